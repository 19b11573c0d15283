"""A barrier in MPI that times out, and then returns the missing ranks."""

from __future__ import annotations

import json
import logging
import math
import time
from typing import Any

_log = logging.getLogger(__name__)
LIMIT_S = 60.0
"""Seconds for set-up, unless the user sets a timeout."""
_WARN_AFTER_S = 10.0
_GRACE_S = 1.0  # in which the verdict of the first rank arrives
_TAG = 32_766  # beside the model's own
_BYTES = 256  # of a verdict
_SHOWN = 32  # ranks that fit into a verdict
_SPINS = 1_000  # tests before the first nap
_NAP_S = 1e-3
_HERE = b"!"  # global, because MPI may read it even after an abandoned call
# Buffers that MPI may still access, by id: an interrupt leaves them here permanently.
_held: dict[int, object] = {}


def bounded_barrier(mpi: Any, comm: Any, limit_s: float, what: str) -> list[int]:
    """Wait until all ranks have arrived, or rank 0 times out; return the missing ones."""
    # Collective over `comm`, in messages: a collective call of MPI can't be cancelled and doesn't
    # report missing ranks.
    if comm.rank == 0:
        return _collect(mpi, comm, limit_s, what)
    comm.Isend([_HERE, mpi.BYTE], 0, _TAG).Test()  # never waited for, as its buffer stays
    verdict = bytearray(_BYTES)
    _held[id(verdict)] = verdict
    answer = comm.Irecv([verdict, mpi.BYTE], 0, _TAG)
    is_late = _await([answer], limit_s + _GRACE_S, f"{what}: rank {comm.rank} awaits rank 0")
    if is_late:
        # Until a cancelled request is completed, MPI may write to its buffer.
        answer.Cancel()
        answer.Wait()
    del _held[id(verdict)]
    return [0] if is_late else list(json.loads(verdict.rstrip(b"\0")))


def _collect(mpi: Any, comm: Any, limit_s: float, what: str) -> list[int]:
    """Wait for the other ranks; send them the list of missing ranks, and return it."""
    others = range(1, comm.size)
    marks = bytearray(len(others))
    _held[id(marks)] = marks
    view = memoryview(marks)  # whose slices are parts of the same memory
    requests = [
        comm.Irecv([view[at : at + 1], mpi.BYTE], rank, _TAG) for at, rank in enumerate(others)
    ]
    text = f"{what}: rank 0 awaits all of {len(others)} others"
    open_indices = _await(requests, limit_s, text)
    absent = [others[at] for at in open_indices]
    verdict = json.dumps(absent[:_SHOWN]).encode().ljust(_BYTES, b"\0")
    sends = []
    _held[id(verdict)] = verdict
    for at, (rank, request) in enumerate(zip(others, requests, strict=True)):
        if at in open_indices:
            request.Cancel()
            request.Wait()
        else:
            sends.append(comm.Isend([verdict, mpi.BYTE], rank, _TAG))
    del _held[id(marks)]
    if not _await(sends, _GRACE_S, what):  # else MPI still reads the verdict
        del _held[id(verdict)]
    return absent[:_SHOWN]


def _await(requests: list[Any], limit_s: float, what: str) -> set[int]:
    """Test requests until all are done or the time is over; return the open ones' positions."""
    begin, spins = time.monotonic(), 0
    warn_at = begin + _WARN_AFTER_S
    left = set(range(len(requests)))
    while left:
        left = {at for at in left if not requests[at].Test()}
        now = time.monotonic()
        if now > begin + limit_s:
            break
        if left and now > warn_at:
            warn_at = math.inf
            _log.warning("%s, for %g s so far, and for %g s at most", what, _WARN_AFTER_S, limit_s)
        spins += 1
        if spins > _SPINS:
            time.sleep(_NAP_S)
    return left
