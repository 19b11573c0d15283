"""Twelve ways in which rank 1 of three keeps a job from going on, and a program that hangs so.

    python -m tests.support.hangs BACKEND KIND                  three ranks, by spawn
    python -m tests.support.hangs BACKEND KIND RANK STORE       one of three, by hand
    mpiexec -n 3 python -m tests.support.hangs mpi4py KIND      one of three, by MPI

The line that rank 1 is in has a remark ``here: KIND``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unisono as idist

__all__ = ("KINDS", "LATE", "SIZE", "lines_of", "work")

SIZE, LATE = 3, 1
N_WORDS = 1 << 18


def lines_of(kind: str) -> set[int]:
    """Give the lines that have the remark."""
    lines = Path(__file__).read_text().splitlines()
    return {n for n, line in enumerate(lines, 1) if line.endswith(f"# here: {kind}")}


def asleep(rank: int) -> None:
    if rank == LATE:
        time.sleep(600)  # here: asleep
    idist.barrier()


def busy(rank: int) -> None:
    while rank == LATE:  # here: busy
        pass  # here: busy
    idist.barrier()


def stopped(rank: int) -> None:
    if rank == LATE:
        os.kill(os.getpid(), signal.SIGSTOP)  # here: stopped
    idist.barrier()


def locked(rank: int) -> None:
    lock = threading.Lock()
    lock.acquire()
    if rank == LATE:
        lock.acquire()  # here: locked
    idist.barrier()


def in_c(rank: int) -> None:
    if rank == LATE:
        mutex = ctypes.create_string_buffer(64)
        lock = ctypes.PyDLL(None).pthread_mutex_lock  # it keeps the interpreter lock
        lock(mutex)
        others_wait()
        lock(mutex)  # here: in_c
    idist.barrier()


def others_wait() -> None:
    """Give ranks that are threads of this process time to come to their call: they need the lock.

    A page tells that they are in it.
    """
    from unisono.observe.jobs import Meter, look

    while sum(not call.end_ns for job in look(Meter()) for each in job.ranks
              for call in each.rank.calls) < SIZE - 1:  # fmt: skip
        time.sleep(0.01)


def dead(rank: int) -> None:
    if rank == LATE:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(idist.errors.CollectiveError):
        idist.barrier()
    threading.Event().wait()


def missing_call(rank: int) -> None:
    if rank != LATE:
        idist.barrier()
    threading.Event().wait()  # here: missing_call


def extra_call(rank: int) -> None:
    if rank == LATE:
        idist.barrier()  # here: extra_call
    threading.Event().wait()


def mismatch(rank: int) -> None:
    """Without the comparison of calls, which would refuse it."""
    value = torch.ones(N_WORDS)
    if rank == LATE:
        idist.broadcast(value, src=LATE - 1)  # here: mismatch
        idist.broadcast(value, src=LATE - 1)  # here: mismatch
    else:
        idist.all_reduce(value)
    idist.barrier()


def other_group(rank: int) -> None:
    pair = idist.new_group([0, LATE])
    if rank == LATE:
        idist.barrier(group=pair)  # here: other_group
    idist.barrier()


class Stuck(torch.utils.data.Dataset[int]):
    """A data set whose second item never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> int:
        if at:
            threading.Event().wait()  # here: slow_loader
        return at


def slow_loader(rank: int) -> None:
    if rank == LATE:
        is_thread = threading.current_thread() is not threading.main_thread()
        loader = torch.utils.data.DataLoader(Stuck(), num_workers=0 if is_thread else 1)
        for _ in loader:  # here: slow_loader
            pass
    idist.barrier()


def fork(rank: int) -> None:
    if rank == LATE:
        lock = threading.Lock()
        lock.acquire()
        child = os.fork()
        if not child:
            lock.acquire()  # as a lock that another thread held when it was forked
        os.waitpid(child, 0)  # here: fork
    idist.barrier()


def disk_full(rank: int) -> None:
    while rank == LATE:  # here: disk_full
        with contextlib.suppress(OSError):  # here: disk_full
            Path("/dev/full").write_bytes(b"checkpoint")  # here: disk_full
        time.sleep(0.01)  # here: disk_full
    idist.barrier()


def in_step(rank: int) -> None:
    """No fault: nobody waits for another."""
    threading.Event().wait()


_ALL = (
    *(asleep, busy, stopped, locked, in_c, dead, missing_call, extra_call, mismatch, other_group),
    *(slow_loader, fork, disk_full),
)
KINDS: dict[str, Callable[[int], None]] = {each.__name__: each for each in _ALL}
_WAYS = {**KINDS, "in_step": in_step}


def work(local_rank: int, kind: str) -> None:
    """Call something together, then hang."""
    torch.set_num_threads(1)
    idist.barrier()
    idist.all_reduce(1.0)
    _WAYS[kind](idist.get_rank())


def _main(backend: str, kind: str, *place: str) -> None:
    if not place and backend != "mpi4py":
        idist.spawn(backend, work, (kind,), nproc_per_node=SIZE)
        return
    options: dict[str, Any] = {}
    if place:
        rank, store = place
        options = {"rank": int(rank), "world_size": SIZE, "init_method": f"file://{store}"}
    idist.initialize(backend, **options)
    work(0, kind)


if __name__ == "__main__":
    _main(*sys.argv[1:])
