"""How ranks of MPI find out who hangs, and come together before a call that MPI can't give up."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ("LIMIT_S", "Asking", "missing")

_QUESTION, _ANSWER = 32_764, 32_765  # tags beside those of the model's own messages
_BYTES = 256
_ANSWER_NAP_S = 1e-3
_sending = threading.Lock()
_sent: list[list[Any]] = []  # what MPI reads, until it is done: longer than a context where need be


class Asking:
    """Questions between ranks that wait, in messages.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator of all ranks.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm

    def answer(self, doing: str) -> None:
        """Tell those who have asked since the last time. Local; doesn't wait.

        Args:
            doing: what this rank waits in.
        """
        for rank, _ in self._heard(_QUESTION):
            self._send(doing.encode()[:_BYTES], rank, _ANSWER)

    def ask(self, ranks: Iterable[int], doing: str, limit_s: float) -> dict[int, str]:
        """Ask ranks what they wait in, answering those that ask too.

        Local.

        Args:
            ranks: whom to ask.
            doing: as in `answer`.
            limit_s: seconds to wait for the answers.

        Returns:
            The answers, by rank. Who isn't there gives none, nor who waits without a deadline.
        """
        asked = {rank for rank in ranks if rank != self._comm.rank}
        for rank in asked:
            self._send(b"?", rank, _QUESTION)
        found: dict[int, str] = {}
        until = time.monotonic() + limit_s
        while asked - found.keys() and time.monotonic() < until:
            self.answer(doing)
            found |= {rank: said.decode("utf-8", "replace") for rank, said in self._heard(_ANSWER)}
            time.sleep(_ANSWER_NAP_S)
        self.answer(doing)
        return found

    def _heard(self, tag: int) -> list[tuple[int, bytes]]:
        heard = []
        status = self._mpi.Status()
        # The message itself, not word of it: another thread that waits would take that one.
        while message := self._comm.Improbe(self._mpi.ANY_SOURCE, tag, status):
            body = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([body, self._mpi.BYTE])
            heard.append((status.Get_source(), bytes(body)))
        return heard

    def _send(self, body: bytes, rank: int, tag: int) -> None:
        sent: list[Any] = [None, body]
        with _sending:
            _sent[:] = [item for item in _sent if not self._is_done(item[0])]
            _sent.append(sent)  # before MPI has it: an interrupt in between must not free it
        sent[0] = self._comm.Isend([body, self._mpi.BYTE], rank, tag)

    def _is_done(self, request: Any) -> bool:
        """Tell whether MPI is done with a message, which may be of a context that is over."""
        try:
            return request is not None and bool(request.Test())
        except self._mpi.Exception:
            return True


_log = logging.getLogger(__name__)
LIMIT_S = 60.0
"""Seconds for set-up, where the user says nothing."""
_WARN_AFTER_S = 10.0
_GRACE_S = 1.0  # how long the word of the first rank may take to the others
_TAG = 32_766  # beside that of the model's own messages
_HERE = b"!"  # outlives every call, also one that is given up
_WORD_BYTES = 256
_SHOWN = 32
_SPINS = 1_000
_NAP_S = 1e-3
# What MPI may still write to or read from, by its id: an interrupt leaves it there for good.
_held: dict[int, object] = {}


def missing(mpi: Any, comm: Any, ranks: Sequence[int], limit_s: float, what: str) -> list[int]:
    """Wait until all of some ranks have come, or the first of them has waited long enough.

    Collective over `ranks`, in messages, for a collective call of MPI can't be given up and doesn't
    tell who is missing.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator.
        ranks: some ranks of it, this one among them.
        limit_s: seconds to wait.
        what: what is waited in, for a warning.

    Returns:
        Who didn't come, up to some number of them.
    """
    first, *others = ranks
    if not others:
        return []
    if comm.rank == first:
        return _hear(mpi, comm, others, limit_s, what)
    comm.Isend([_HERE, mpi.BYTE], first, _TAG).Test()
    word = bytearray(_WORD_BYTES)
    _held[id(word)] = word
    answer = comm.Irecv([word, mpi.BYTE], first, _TAG)
    is_late = _await([answer], limit_s + _GRACE_S, f"{what}: rank {comm.rank} awaits rank {first}")
    if is_late:
        answer.Cancel()
        answer.Wait()
    del _held[id(word)]
    if is_late:
        return [first]
    found: list[int] = json.loads(word.rstrip(b"\0"))
    return found


def _hear(mpi: Any, comm: Any, others: list[int], limit_s: float, what: str) -> list[int]:
    seats = bytearray(len(others))
    _held[id(seats)] = seats
    view = memoryview(seats)
    calls = [
        comm.Irecv([view[at : at + 1], mpi.BYTE], rank, _TAG) for at, rank in enumerate(others)
    ]
    open_at = _await(calls, limit_s, f"{what}: rank {comm.rank} awaits all of {len(others)} others")
    absent = [others[at] for at in open_at]
    word = json.dumps(absent[:_SHOWN]).encode().ljust(_WORD_BYTES, b"\0")
    sends = []
    _held[id(word)] = word
    for at, (rank, call) in enumerate(zip(others, calls, strict=True)):
        if at in open_at:
            call.Cancel()
            call.Wait()
        else:
            sends.append(comm.Isend([word, mpi.BYTE], rank, _TAG))
    del _held[id(seats)]
    if not _await(sends, _GRACE_S, what):
        del _held[id(word)]
    return absent[:_SHOWN]


def _await(calls: list[Any], limit_s: float, what: str) -> set[int]:
    """Test requests until all are done or the time is over; give the places of the others."""
    begin, spins = time.monotonic(), 0
    warn_at = begin + _WARN_AFTER_S
    left = set(range(len(calls)))
    while left:
        left = {at for at in left if not calls[at].Test()}
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
