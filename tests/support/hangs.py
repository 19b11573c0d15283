"""Ways in which rank 1 makes a job hang, and a program that hangs in one of them.

    python -m tests.support.hangs BACKEND KIND

The program has three ranks. The line in which rank 1 hangs has a remark ``here: KIND``.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import unisono as idist

SIZE, LATE = 3, 1
MODELS = {
    "gloo": "native (gloo)",
    "threads": "threads",
    "mpi4py": "MPI",
    "horovod": "Horovod",
    "xla-cpu": "XLA (CPU)",
}
N_WORDS = 1 << 18


def lines_of(kind: str) -> set[int]:
    """Return the numbers of the lines with a kind's remark."""
    lines = Path(__file__).read_text().splitlines()
    return {n for n, line in enumerate(lines, 1) if line.endswith(f"# here: {kind}")}


def wait() -> None:
    threading.Event().wait()


def asleep() -> None:
    time.sleep(600)  # here: asleep


def busy() -> None:
    while True:  # here: busy
        pass  # here: busy


def stopped() -> None:
    if is_thread():
        others_wait()
    # A signal to the process might be delivered to another thread, while this one goes on.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # here: stopped


def locked() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # here: locked


def in_c() -> None:
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.PyDLL(None).pthread_mutex_lock  # it keeps the interpreter lock
    lock(mutex)
    others_wait()
    lock(mutex)  # here: in_c


def is_thread() -> bool:
    """Return whether the ranks are threads of one process."""
    return threading.current_thread() is not threading.main_thread()


def others_wait() -> None:
    """Wait until all other ranks are in their next call, as the status pages show it.

    If they are threads of this process, they couldn't get there after it is stopped or locked.
    """
    from unisono.observe.jobs import Meter, look

    def n_waiting() -> int:
        calls = {each.rank: each.calls for job in look(Meter()) for each in job.ranks}
        mine = max((call.number for call in calls.get(LATE, ())), default=0)
        return sum(
            any(call.number == mine + 1 and not call.end_ns for call in each)
            for each in calls.values()
        )

    while n_waiting() < idist.get_world_size() - 1:
        time.sleep(0.01)


def dead() -> None:
    """End the rank's process by a signal, or its thread by an exception."""
    if is_thread():
        raise EOFError("this rank ends")  # here: dead
    os.kill(os.getpid(), signal.SIGKILL)


def outlive() -> None:
    """Go on after a rank has died, if its end doesn't end other ranks."""
    if is_thread():
        idist.barrier()
    with contextlib.suppress(idist.errors.CollectiveError):
        idist.barrier()
    wait()


def missing_call() -> None:
    threading.Event().wait()  # here: missing_call


def extra_call() -> None:
    idist.barrier()  # here: extra_call


def mismatch() -> None:
    """Make another call than the other ranks; the job doesn't compare calls."""
    value = torch.ones(N_WORDS)
    idist.broadcast(value, src=LATE - 1)  # here: mismatch
    idist.broadcast(value, src=LATE - 1)  # here: mismatch


def other_group() -> None:
    pair = idist.new_group([0, LATE])
    if idist.get_rank() == LATE:
        idist.barrier(group=pair)  # here: other_group


class Stuck(torch.utils.data.Dataset[int]):
    """A data set whose second item never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> int:
        if at:
            threading.Event().wait()  # here: slow_loader
        return at


def slow_loader() -> None:
    loader = torch.utils.data.DataLoader(Stuck(), num_workers=0 if is_thread() else 1)
    for _ in loader:  # here: slow_loader
        pass


def fork() -> None:
    lock = threading.Lock()
    lock.acquire()
    child = os.fork()
    if not child:
        lock.acquire()  # as a lock that another thread held when it was forked
    os.waitpid(child, 0)  # here: fork


def disk_full() -> None:
    while True:  # here: disk_full
        with contextlib.suppress(OSError):  # here: disk_full
            Path("/dev/full").write_bytes(b"checkpoint")  # here: disk_full
        time.sleep(0.01)  # here: disk_full


def early() -> None:
    """Sleep on the other ranks, so that rank 1 is alone in a call."""
    time.sleep(600)  # here: early


_ALL = (
    asleep, busy, stopped, locked, in_c, dead, missing_call, extra_call, mismatch, other_group,
    slow_loader, fork, disk_full,
)  # fmt: skip
KINDS: dict[str, Callable[[], object]] = {each.__name__: each for each in _ALL}
"""By kind, the function of rank 1 before a barrier of all ranks."""
_OTHERS: dict[str, Callable[[], object]] = {
    "dead": outlive,
    "extra_call": wait,
    "mismatch": lambda: idist.all_reduce(torch.ones(N_WORDS)),
    "other_group": other_group,
    "early": early,
    "in_step": wait,
}
"""By kind, the function of the other ranks before that barrier."""


TWELVE = tuple(kind for kind in KINDS if kind != "other_group")
"""Kinds that are tested on every model."""
BY_HAND = {("dead", "gloo"): "where one program starts all ranks, it ends them all at once"}
"""Jobs whose ranks are started by hand, a process each, and the reason."""
_ALONE = {"UNISONO_DEBUG": "0", "UNISONO_SHARED_BYTES": "0"}
VARIABLES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("mismatch", "gloo"): _ALONE,
    ("mismatch", "horovod"): _ALONE,
}
"""Variables of a job that turn the comparison of calls off, so that the libraries hang."""
_COMPARED = "the ranks' calls are always compared"
_CRASHES = "the ranks' calls are compared; where they aren't, MPI crashes"
_THREAD = "a thread can't be killed alone; it ends by an exception"
_LIBRARY = "the library ends a job with each of its ranks"
ENDS: Mapping[tuple[str, str], str] = {
    ("dead", "threads"): _THREAD,
    ("dead", "xla-cpu"): _THREAD,
    ("dead", "mpi4py"): _LIBRARY,
    ("dead", "horovod"): _LIBRARY,
    ("mismatch", "mpi4py"): _CRASHES,
    ("mismatch", "threads"): _COMPARED,
    ("mismatch", "xla-cpu"): _COMPARED,
}
"""Jobs that end at once with an error that names the rank, and the reason why they don't hang."""


def is_blamed(kind: str, printed: str) -> bool:
    """Return whether a job's error begins with rank 1, and has its line if it has one."""
    begins = re.search(rf"Error: rank {LATE} (?:of \d+ (?:was ended|raised)|called) ", printed)
    has_line = any(f"{Path(__file__).name}:{line}" in printed for line in lines_of(kind))
    return begins is not None and (has_line or "was ended by SIGKILL" in printed)


def work(local_rank: int, kind: str) -> None:
    """Make two calls on all ranks, then hang."""
    torch.set_num_threads(1)
    idist.barrier()
    idist.all_reduce(1.0)
    ways = {**KINDS, "in_step": wait} if idist.get_rank() == LATE else _OTHERS
    ways.get(kind, idist.get_rank)()
    idist.barrier()  # here: all


def main(backend: str, kind: str) -> None:
    if (kind, backend) in BY_HAND:
        by_hand(backend, kind)
    else:
        os.environ.update(VARIABLES.get((kind, backend), {}))
        idist.spawn(backend, work, (kind,), nproc_per_node=SIZE)


def by_hand(backend: str, kind: str) -> None:
    """Run a process for each rank; the other ranks go on when one has ended."""
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        places = [(rank, f"file://{folder}/store") for rank in range(SIZE)]
        ranks = [forks.Process(target=_join, args=(backend, kind, *place)) for place in places]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


def _join(backend: str, kind: str, rank: int, store: str) -> None:
    idist.initialize(backend, rank=rank, world_size=SIZE, init_method=store)
    work(0, kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
