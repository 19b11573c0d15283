"""What the parent sees and leaves: who makes its ranks may be stopped, and ranks may be, too."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import unisono
from tests.support.measures import slack
from tests.support.processes import Pipe, say, until
from unisono.errors import CollectiveTimeoutError, WorkerFailedError
from unisono.launchers.job.worker_handles import Workers


def add(local_rank: int) -> int:
    return int(unisono.all_reduce(1))


def maker(local_rank: int) -> int:
    return os.getppid()


@pytest.fixture
def limit_s() -> float:
    """How long a job may take in which something is stopped."""
    return 6.0 * slack()


@pytest.fixture
def helper() -> Iterator[int]:
    """Give the id of the process that makes ranks; it goes on at the end whatever a test did."""
    (pid,) = unisono.spawn("gloo", maker)
    yield pid
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGCONT)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 60)


def test_a_maker_that_is_stopped_while_ranks_work_costs_seconds(
    limit_s: float, helper: int
) -> None:
    def fn(local_rank: int) -> int:
        unisono.barrier()
        if local_rank == 0:
            stop(os.getppid())
        return add(local_rank)

    start = time.monotonic()
    assert unisono.spawn("gloo", fn, nproc_per_node=2, timeout=15) == [2, 2]
    assert time.monotonic() - start < limit_s
    assert unisono.spawn("gloo", maker) == [helper]


def test_a_maker_that_is_stopped_before_a_job_makes_its_ranks(limit_s: float, helper: int) -> None:
    stop(helper)
    start = time.monotonic()
    assert unisono.spawn("gloo", add, nproc_per_node=2, timeout=15) == [2, 2]
    assert time.monotonic() - start < limit_s


def test_a_rank_that_dies_while_its_maker_is_stopped_is_named(helper: int) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            stop(os.getppid())
            os.kill(os.getpid(), signal.SIGKILL)
        unisono.barrier()

    with pytest.raises(WorkerFailedError, match="rank 1 of 2 was ended by SIGKILL"):
        unisono.spawn("gloo", fn, nproc_per_node=2, timeout=15)


def test_ranks_are_ended_though_their_maker_stays_stopped(
    limit_s: float, helper: int, tmp_path: Path
) -> None:
    def fn(local_rank: int, path: str) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(path, os.getpid())
        signal.pause()

    with Pipe(tmp_path) as pipe:
        job = unisono.spawn("gloo", fn, (pipe.path,), nproc_per_node=2, join=False)
        pids = [int(pid) for pid in pipe.read(2)]
    stop(helper)
    start = time.monotonic()
    assert isinstance(job.ranks, Workers)
    job.ranks.maker = None  # nobody wakes it
    job.terminate()
    assert time.monotonic() - start < limit_s
    assert all(
        not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        for pid in pids
    )


def test_a_maker_that_died_is_no_zombie(helper: int) -> None:
    def fn(local_rank: int) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(WorkerFailedError, match="the process that made it died"):
        unisono.spawn("gloo", fn, nproc_per_node=2)
    assert not psutil.pid_exists(helper)


def stop_last(local_rank: int) -> int:
    unisono.barrier()
    if local_rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return local_rank


def test_a_rank_that_is_stopped_after_its_last_collective_is_named_at_the_timeout(
    limit_s: float,
) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match="rank 1 of 2 was stopped by SIGSTOP") as caught:
        unisono.spawn("gloo", stop_last, nproc_per_node=2, timeout=2)
    assert (caught.value.rank, caught.value.signal) == (1, "SIGSTOP")
    assert 2 < time.monotonic() - start < limit_s


def test_a_rank_that_is_stopped_after_its_last_collective_is_named_at_the_deadline(
    limit_s: float,
) -> None:
    start = time.monotonic()
    with (
        pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] of 2.*rank 1 was stopped by SIG"),
        unisono.deadline(2),
    ):
        unisono.spawn("gloo", stop_last, nproc_per_node=2)
    assert time.monotonic() - start < limit_s


def test_a_rank_that_goes_on_in_time_is_no_failure(tmp_path: Path) -> None:
    def fn(local_rank: int, path: str) -> int:
        unisono.barrier()
        if local_rank == 1:
            say(path, os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(4)  # longer than the timeout, without a collective
        return local_rank

    with Pipe(tmp_path) as pipe:
        job = unisono.spawn("gloo", fn, (pipe.path,), nproc_per_node=2, timeout=2, join=False)
        pid = int(pipe.read(1)[0])
        with pytest.raises(unisono.errors.LaunchError, match="haven't finished"):
            job.join(1.0)
        os.kill(pid, signal.SIGCONT)
        assert job.join() == [0, 1]


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


def fail(local_rank: int) -> None:
    raise ValueError("mine")


def die(local_rank: int) -> None:
    os._exit(3)


@pytest.mark.parametrize("fn", [fail, die])
def test_an_error_that_is_kept_keeps_nothing_else(fn: Any) -> None:
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
        assert held() == before
        with unisono.WorkerPool("gloo", nproc_per_node=2) as pool:
            for _ in range(3):
                with pytest.raises(WorkerFailedError) as caught:
                    pool.run(fn)
                kept.append(caught.value)
        assert held() == before
        for _ in range(3):
            with pytest.raises(WorkerFailedError), unisono.WorkerPool("gloo", 2) as pool:
                pool.run(fn)
        assert held() == before
    finally:
        gc.enable()
