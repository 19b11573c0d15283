"""What the parent sees and leaves: what it started may be stopped, and none of it outlives it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

import unisono
from tests.support.faults import FAULTS
from tests.support.measures import slack
from tests.support.processes import SOURCES, Pipe, gone, say, until
from unisono.errors import CollectiveTimeoutError, WorkerFailedError


def add(local_rank: int) -> int:
    return int(unisono.all_reduce(1))


def server_of(local_rank: int) -> int:
    return os.getppid()


@pytest.fixture
def limit_s() -> float:
    """How long a job may take in which something is stopped."""
    return 6.0 * slack()


@pytest.fixture
def fork_server() -> Iterator[int]:
    """Give the id of the fork server; it goes on at the end whatever a test did."""
    (pid,) = unisono.spawn("gloo", server_of)
    yield pid
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGCONT)


def stop(pid: int) -> None:
    """Stop a process, again where the parent has woken it before anybody saw that it stopped."""

    def is_stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    until(is_stopped, 60)


def test_a_fork_server_that_is_stopped_while_ranks_work_or_before_costs_seconds(
    limit_s: float, fork_server: int
) -> None:
    def fn(local_rank: int) -> int:
        unisono.barrier()
        if local_rank == 0:
            stop(os.getppid())
        return add(local_rank)

    for work in (fn, add):
        start = time.monotonic()
        assert unisono.spawn("gloo", work, nproc_per_node=2, timeout=15) == [2, 2]
        assert time.monotonic() - start < limit_s
        assert unisono.spawn("gloo", server_of) == [fork_server]
        stop(fork_server)


def test_a_rank_that_dies_while_its_fork_server_is_stopped_is_named(fork_server: int) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            stop(os.getppid())
            os.kill(os.getpid(), signal.SIGKILL)
        unisono.barrier()

    with pytest.raises(WorkerFailedError, match="rank 1 of 2 was ended by SIGKILL"):
        unisono.spawn("gloo", fn, nproc_per_node=2, timeout=15)


def test_ranks_are_ended_though_they_ignore_sigterm(limit_s: float, tmp_path: Path) -> None:
    def fn(local_rank: int, path: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(path, os.getpid())
        signal.pause()

    with Pipe(tmp_path) as pipe:
        job = unisono.spawn("gloo", fn, (pipe.path,), nproc_per_node=2, join=False)
        pids = [int(pid) for pid in pipe.read(2)]
    start = time.monotonic()
    job.terminate()
    assert time.monotonic() - start < limit_s
    assert not gone(pids, 0)
    with pytest.raises(WorkerFailedError):
        job.join()
    job.terminate()


def test_a_fork_server_that_died_is_named_and_the_next_job_has_another() -> None:
    def fn(local_rank: int) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(WorkerFailedError, match="its parent process died"):
        unisono.spawn("gloo", fn, nproc_per_node=2)
    assert unisono.spawn("gloo", add, nproc_per_node=2) == [2, 2]


def stop_last(local_rank: int) -> int:
    unisono.barrier()
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return local_rank


def test_a_rank_that_is_stopped_after_its_last_collective_is_named_in_time(limit_s: float) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match="rank 1 of 2 was stopped by SIGSTOP") as caught:
        unisono.spawn("gloo", stop_last, nproc_per_node=2, timeout=2)
    assert (caught.value.rank, caught.value.signal) == (1, "SIGSTOP")
    assert 2 < time.monotonic() - start < limit_s
    start, named = time.monotonic(), r"ranks \[1\] of 2.*rank 1 was stopped by SIG"
    with pytest.raises(CollectiveTimeoutError, match=named), unisono.deadline(2):
        unisono.spawn("gloo", stop_last, nproc_per_node=2)
    assert time.monotonic() - start < limit_s


def test_ranks_that_the_parent_ended_are_not_the_first_failure() -> None:
    def fn(local_rank: int) -> None:
        if local_rank == 1:
            return
        if local_rank == 2:
            signal.pause()
        unisono.barrier()

    with pytest.raises(WorkerFailedError, match="rank 0 of 3 raised .*PeerFailedError") as caught:
        unisono.spawn("gloo", fn, nproc_per_node=3, timeout=60)
    assert caught.value.rank == 0
    assert caught.value.signal is None


def held() -> tuple[int, int, int]:
    """Count listening sockets, descriptors and threads of this process."""
    process = psutil.Process()
    listening = [c for c in process.net_connections("all") if c.status == psutil.CONN_LISTEN]
    return len(listening), process.num_fds(), process.num_threads()


def until_it_holds(before: tuple[int, int, int]) -> None:
    """Wait a moment: the kernel has a thread a little longer than who has joined it."""
    with suppress(AssertionError):
        until(lambda: held() == before, 5)
    assert held() == before


@pytest.mark.parametrize("fault", ["raises", "os._exit(3)"])
def test_an_error_that_is_kept_keeps_nothing_else(fault: str) -> None:
    def fn(local_rank: int) -> None:
        FAULTS[fault].do()

    unisono.spawn("gloo", add, nproc_per_node=2)
    gc.collect()
    before = held()
    gc.disable()
    try:
        kept = []
        for _ in range(3):
            with pytest.raises(WorkerFailedError) as caught:
                unisono.spawn("gloo", fn, nproc_per_node=2)
            kept.append(caught.value)
        until_it_holds(before)
        with unisono.WorkerPool("gloo", nproc_per_node=2) as pool:
            for _ in range(3):
                with pytest.raises(WorkerFailedError) as caught:
                    pool.run(fn)
                kept.append(caught.value)
        until_it_holds(before)
        for _ in range(3):
            with pytest.raises(WorkerFailedError), unisono.WorkerPool("gloo", 2) as pool:
                pool.run(fn)
        until_it_holds(before)
    finally:
        gc.enable()


# Each process writes its id into the parent's standard output once it is where it will stay.
STUCK = """
import ctypes, os, signal, unisono

def here():
    os.write(1, b"%d\\n" % os.getpid())

def compute(local_rank):
    here()
    while True:
        pass

def wait(local_rank):
    if local_rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here()
    if local_rank == 0:
        unisono.barrier()
    signal.pause()

def sleep_in_c(local_rank):
    here()
    ctypes.CDLL(None).sleep(600)

def hold_the_gil(local_rank):
    here()
    ctypes.PyDLL(None).sleep(600)

def stop(local_rank):
    here()
    os.kill(os.getpid(), signal.SIGSTOP)
"""
KILLED = """
jobs = [unisono.spawn("gloo", wait, nproc_per_node=2, join=False)]
jobs += [unisono.spawn("gloo", fn, join=False) for fn in (compute, hold_the_gil, stop)]
jobs.append(unisono.spawn("gloo", sleep_in_c, start_method="fork", join=False))
if os.fork() == 0:  # a child of the user's own, which holds all that its parent held
    os.write(1, b"%d\\n" % -os.getpid())
signal.pause()
"""
STARTING = """
job = unisono.spawn("gloo", compute, start_method="spawn", join=False)
signal.pause()
"""
INTERRUPTED = """
def one_of_each(local_rank):
    [wait, hold_the_gil, compute][local_rank](local_rank)

unisono.spawn("gloo", one_of_each, nproc_per_node=3)
"""
INTERRUPTED_POOL = """
with unisono.WorkerPool("gloo", 2) as pool:
    pool.run(lambda local_rank: [hold_the_gil, stop][local_rank](local_rank))
"""
# Stops each process that imports torch in order to become a worker.
SITE = """
import os, signal, sys

class Stop:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch" and "launchers.job.worker" in "".join(sys.orig_argv):
            os.write(1, b"%d\\n" % os.getpid())
            while True:
                signal.pause()

sys.meta_path.insert(0, Stop)
"""


@contextmanager
def parent_of(program: str, folder: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCES}" if folder else SOURCES},
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def pids_of(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


def test_no_replica_outlives_a_parent_that_is_killed() -> None:
    limit_s = slack()  # 2 s on an idle host
    with parent_of(KILLED) as parent:
        said = pids_of(parent, 7)
        parent.kill()
        replicas = [pid for pid in said if pid > 0]
        assert not gone(replicas, limit_s)
        assert len(gone([-pid for pid in said if pid < 0], 0)) == 1


def test_a_worker_that_is_still_starting_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    with parent_of(STARTING, tmp_path) as parent:
        assert parent.stdout is not None
        starting = int(parent.stdout.readline())
        parent.kill()
        assert not gone([starting], slack())


@pytest.mark.parametrize(
    ("program", "size", "is_of_all"),
    [(INTERRUPTED, 3, True), (INTERRUPTED_POOL, 2, False)],
    ids=["spawn", "pool"],
)
def test_ctrl_c_ends_everybody(program: str, size: int, is_of_all: bool) -> None:
    limit_s = slack()
    with parent_of(program) as parent:
        replicas = pids_of(parent, size)
        (os.killpg if is_of_all else os.kill)(parent.pid, signal.SIGINT)
        assert not gone(replicas, limit_s)
        _, text = parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGINT
    assert "Traceback" not in text, text
    assert text.count("KeyboardInterrupt") == 1, text


def test_ctrl_c_ends_replicas_that_are_threads() -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        unisono.barrier(group=[1, 2] if local_rank else None)

    with pytest.raises(KeyboardInterrupt):
        unisono.spawn("threads", fn, nproc_per_node=3)
