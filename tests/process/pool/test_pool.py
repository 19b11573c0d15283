"""Warm replicas: many calls, calls that fail, replicas that die."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import unisono
from tests.support.processes import SOURCES, gone, in_fork
from unisono import WorkerPool
from unisono.deadlines import limit_of
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ContextError,
    NotInitializedError,
    PayloadError,
    UnknownBackendError,
    WorkerFailedError,
)

SOON_S = 8.0  # on a busy host; all that this bounds else takes 10 s or has no end


BACKENDS = ["threads", "gloo"]


@pytest.fixture(params=BACKENDS)
def fresh(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    with WorkerPool(request.param, nproc_per_node=3) as made:
        yield made


@pytest.fixture(scope="module")
def processes() -> Iterator[WorkerPool]:
    with WorkerPool("gloo", nproc_per_node=3) as made:
        made.run(abs)
        yield made


@pytest.fixture(params=BACKENDS)
def pool(request: pytest.FixtureRequest, processes: WorkerPool) -> Iterator[WorkerPool]:
    """For calls that leave its replicas as they are, so that those that are processes stay."""
    with contextlib.ExitStack() as stack:
        is_warm = request.param == "gloo"
        yield processes if is_warm else stack.enter_context(WorkerPool("threads", 3))


def facts(local_rank: int, base: int, *, step: int = 0) -> tuple[int, int, int]:
    return local_rank, unisono.get_world_size(), unisono.all_reduce(base + step * local_rank)


@pytest.mark.fast
def test_every_call_runs_in_every_replica_with_collectives(pool: WorkerPool) -> None:
    assert pool.run(facts, 1, step=1) == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]
    assert pool.run(lambda local_rank: torch.full((2,), local_rank).tolist())[2] == [2, 2]


def ident(local_rank: int) -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def test_the_replicas_are_the_same_ones_from_call_to_call(pool: WorkerPool) -> None:
    assert pool.run(ident) == pool.run(ident)


def test_map_gives_results_in_the_order_of_items(pool: WorkerPool) -> None:
    assert pool.map(lambda x: x * x, range(50)) == [x * x for x in range(50)]
    assert pool.map(abs, []) == []
    assert pool.map(abs, [-1]) == [1]


def test_a_call_that_raises_leaves_the_pool_as_it_is(pool: WorkerPool) -> None:
    before = pool.run(ident)

    def fail(local_rank: int) -> None:
        if local_rank == 1:
            raise KeyError("missing")

    with pytest.raises(WorkerFailedError, match="rank 1 of 3 raised KeyError: 'missing'") as caught:
        pool.run(fail)
    assert caught.value.rank == 1
    assert "in fail" in caught.value.traceback
    assert isinstance(caught.value.__cause__, KeyError)
    assert pool.run(ident) == before
    with pytest.raises(WorkerFailedError, match="ZeroDivisionError"):
        pool.map(lambda x: 1 // x, [1, 0, 2])
    assert pool.run(facts, 1)[0] == (0, 3, 3)


def compute(seconds: float) -> float:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return seconds


def test_a_call_that_raises_while_others_compute_leaves_them(pool: WorkerPool) -> None:
    before = pool.run(ident)

    def fail(local_rank: int) -> None:
        if local_rank == 1:
            raise KeyError("missing")
        compute(0.3)

    with pytest.raises(WorkerFailedError, match="rank 1 of 3 raised KeyError"):
        pool.run(fail)
    assert pool.run(ident) == before
    with pytest.raises(WorkerFailedError, match="raised TypeError"):
        pool.map(compute, [0.3, "no number", 0.3])  # type: ignore[arg-type]
    assert pool.run(ident) == before
    assert pool.run(facts, 1)[1] == (1, 3, 3)


def test_map_waits_within_its_deadline_for_others_than_the_one_that_failed(tmp_path: Path) -> None:
    def item(path: Path | None) -> None:
        while not (path or 1 / 0).exists():  # type: ignore[union-attr]
            pass

    with WorkerPool("gloo", nproc_per_node=2) as pool:
        before = pool.run(ident)
        pool._deadline_s = 0.5
        with pytest.raises(WorkerFailedError, match="ZeroDivisionError"):
            pool.map(item, [tmp_path / "never", None])
        pool._deadline_s = None
        assert not {*pool.run(ident)} & {*before}


def test_a_section_that_fails_leaves_the_pool_as_it_is(pool: WorkerPool) -> None:
    before = pool.run(ident)

    @unisono.one_rank_only(rank=1, with_barrier=True)
    def only() -> None:
        raise KeyError("missing")

    def first(local_rank: int) -> None:
        with unisono.one_rank_first(rank=1):
            raise KeyError("missing")

    for fn in (lambda local_rank: only(), first):
        with pytest.raises(WorkerFailedError, match="rank 1 raised KeyError: 'missing'"):
            pool.run(fn)
        assert pool.run(ident) == before
    assert pool.run(facts, 1)[1] == (1, 3, 3)


def test_ranks_out_of_step_get_a_new_context_whatever_they_raise(fresh: WorkerPool) -> None:
    fresh.run(facts, 1)
    before = fresh._replicas

    def hide(local_rank: int) -> None:
        if local_rank:
            return
        try:
            with unisono.deadline(0.2):
                unisono.barrier()
        except CollectiveTimeoutError:
            raise KeyError("mine") from None

    with pytest.raises(WorkerFailedError, match="rank 0 of 3 raised KeyError: 'mine'"):
        fresh.run(hide)
    assert fresh.run(facts, 1)[1] == (1, 3, 3)
    assert fresh._replicas is not before


def spin(local_rank: int) -> None:
    compute(600)


def rest(local_rank: int) -> None:
    time.sleep(600)


def wait_for_torch(local_rank: int) -> None:
    torch.distributed.barrier()


def test_a_call_that_raises_ends_those_that_never_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(local_rank: int, others: Any) -> None:
        if local_rank == 1:
            raise KeyError("missing")
        others(local_rank)

    with WorkerPool("gloo", nproc_per_node=2) as pool:
        for others in (stop, hold_the_gil, wait_for_torch, spin):
            before = pool.run(ident)
            if others is spin:
                monkeypatch.setattr("unisono.pool.call._PATIENCE_S", 0.5)
            start = time.monotonic()
            with pytest.raises(WorkerFailedError, match="rank 1 of 2 raised KeyError"):
                pool.run(fail, others)
            assert time.monotonic() - start < SOON_S
            assert not {*pool.run(ident)} & {*before}


def test_a_call_that_raises_while_others_wait_makes_a_new_context(fresh: WorkerPool) -> None:
    def fail(local_rank: int) -> None:
        if local_rank == 1:
            raise KeyError("missing")
        unisono.barrier()

    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match="rank 1 of 3 raised KeyError"):
        fresh.run(fail)
    assert time.monotonic() - start < 15
    assert fresh.run(facts, 2)[1] == (1, 3, 6)


def test_ranks_that_call_different_things_stay_in_step(pool: WorkerPool) -> None:
    def differ(local_rank: int) -> Any:
        return unisono.barrier() if local_rank else unisono.all_gather(1)

    with pytest.raises(WorkerFailedError, match="CollectiveMismatchError") as caught:
        pool.run(differ)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    assert pool.run(facts, 2)[1] == (1, 3, 6)


def test_an_exit_and_a_result_that_cannot_travel_are_failures(fresh: WorkerPool) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        fresh.run(lambda local_rank: sys.exit(3))
    assert caught.value.exit_code == 3
    with pytest.raises(WorkerFailedError, match="the result, a lock, can't be pickled"):
        fresh.run(lambda local_rank: threading.Lock())
    with pytest.raises(PayloadError, match="can't be pickled"):
        fresh.run(lambda local_rank, lock: None, threading.Lock())
    assert fresh.run(facts, 2)[1] == (1, 3, 6)


def test_a_replica_that_dies_is_named_and_replaced() -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        pids = pool.run(lambda local_rank: os.getpid())

        def die(local_rank: int) -> None:
            if local_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            unisono.barrier()

        with pytest.raises(WorkerFailedError, match="rank 1 of 2 was ended by SIGKILL") as caught:
            pool.run(die)
        assert caught.value.signal == "SIGKILL"
        again = pool.run(lambda local_rank: os.getpid())
        assert not set(pids) & set(again)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        os.kill(again[0], signal.SIGKILL)  # between two calls
        psutil.wait_procs([psutil.Process(again[1])], timeout=20)
        assert pool.run(facts, 1)[1] == (1, 2, 2)
    assert not any(psutil.pid_exists(pid) for pid in again)


@pytest.mark.parametrize("backend", ["gloo", "threads"])
def test_a_call_over_its_deadline_is_ended(backend: str, tmp_path: Path) -> None:
    def stall(local_rank: int, over: Path) -> None:
        if local_rank:
            unisono.barrier()
        while not over.exists():  # a thread can't be ended from outside
            pass

    with WorkerPool(backend, nproc_per_node=2, deadline_s=0.5) as pool:
        pool._deadline_s, limit = 60.0, pool._deadline_s
        pool.run(lambda local_rank: None)
        pool._deadline_s = limit
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0, 1\] of 2 after 0.5 s"):
            pool.run(stall, tmp_path / "over")
        (tmp_path / "over").touch()
        pool._deadline_s = 60.0
        assert pool.run(facts, 1)[1] == (1, 2, 2)


@pytest.mark.parametrize("method", ["run", "map"])
def test_a_call_keeps_to_the_deadline_of_its_block(method: str) -> None:
    with WorkerPool("gloo", nproc_per_node=2, deadline_s=60) as pool:
        pool.run(facts, 1)
        with unisono.deadline(2):
            pool.run(facts, 1)
            start = time.monotonic()
            with pytest.raises(
                CollectiveTimeoutError, match=r"ranks \[0, 1\] of 2 after [012](\.\d+)? s"
            ):
                pool.run(rest) if method == "run" else pool.map(rest, [0, 1])
            assert time.monotonic() - start < SOON_S
            with pytest.raises(CollectiveTimeoutError, match="facts wasn't begun"):
                pool.run(facts, 1)
        assert pool._replicas is None
        assert pool.run(facts, 1)[1] == (1, 2, 2)
        crew = pool._replicas
        with unisono.deadline(0.001):
            while limit_of(None):
                pass
            with pytest.raises(CollectiveTimeoutError, match="facts wasn't begun"):
                pool.run(facts, 1)
        assert pool.run(facts, 1)[1] == (1, 2, 2)
        assert pool._replicas is crew


def stop(local_rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil(local_rank: int) -> None:
    ctypes.PyDLL(None).sleep(600)


@pytest.mark.parametrize(("stuck", "size"), [(stop, 1), (hold_the_gil, 2)])
def test_replicas_that_are_all_stuck_are_ended_at_the_deadline(stuck: Any, size: int) -> None:
    before = {*threading.enumerate()}
    with WorkerPool("gloo", nproc_per_node=size, deadline_s=0.5) as pool:
        pool._deadline_s, limit = 60.0, pool._deadline_s
        pids = pool.run(lambda local_rank: os.getpid())
        pool._deadline_s, start = limit, time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="their replicas are ended"):
            pool.run(stuck)
        assert time.monotonic() - start < SOON_S
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert {*threading.enumerate()} <= before
        pool._deadline_s = 60.0
        assert len(pool.run(facts, 1)) == size


def test_replicas_that_are_stuck_between_calls_are_ended_at_the_end() -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        pids = pool.run(lambda local_rank: os.getpid())
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
    assert time.monotonic() - start < SOON_S
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("method", ["run", "map"])
def test_arguments_that_a_stopped_replica_does_not_read_are_given_up(method: str) -> None:
    with WorkerPool("gloo", deadline_s=60) as pool:
        (pid,) = pool.run(lambda local_rank: os.getpid())
        os.kill(pid, signal.SIGSTOP)
        pool._deadline_s, start = 0.5, time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0\] of 1"):
            if method == "run":
                pool.run(lambda local_rank, text: None, bytes(1 << 24))
            else:
                pool.map(len, [bytes(1 << 24)])
        assert time.monotonic() - start < SOON_S
        assert not psutil.pid_exists(pid)


def test_a_replica_that_is_stopped_within_its_answer_is_ended(tmp_path: Path) -> None:
    with WorkerPool("gloo", deadline_s=60) as pool:
        (pid,) = pool.run(lambda local_rank: os.getpid())
        pool._deadline_s = 1.0
        crew = pool._replicas
        assert crew is not None
        take = crew._inboxes[0].take

        def stop_first() -> Any:  # the answer is larger than what the kernel keeps for it
            os.kill(pid, signal.SIGSTOP)
            return take()

        crew._inboxes[0].take = stop_first  # type: ignore[method-assign]
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0\] of 1"):
            pool.run(lambda local_rank: bytes(1 << 24))
        assert time.monotonic() - start < SOON_S
        assert not psutil.pid_exists(pid)


INTERRUPTED = """
import ctypes, os, signal, sys, unisono

def stay(local_rank):
    os.write(1, b"%d\\n" % os.getpid())
    if local_rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(600)

with unisono.WorkerPool("gloo", 2) as pool:
    pool.run(stay)
"""


def test_ctrl_c_ends_replicas_that_are_stuck() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
    ) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        start = time.monotonic()
        parent.send_signal(signal.SIGINT)
        assert not gone([*pids, parent.pid], 10)
        assert time.monotonic() - start < SOON_S
        assert "KeyboardInterrupt" in parent.communicate()[1]


def test_a_pool_says_what_it_is() -> None:
    with WorkerPool("threads", nproc_per_node=2, deadline_s=2.5) as pool:
        shown = "<WorkerPool('threads', nproc_per_node=2, deadline_s=2.5): %s>"
        assert repr(pool) == shown % "not started yet"
        pool.run(lambda local_rank: None)
        assert repr(pool) == shown % "warm"
    assert repr(pool) == shown % "closed"
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        assert pool.pids == []
        pids = pool.run(lambda local_rank: os.getpid())
        assert pool.pids == pids
        assert repr(pool).endswith(f": warm, processes {', '.join(map(str, sorted(pids)))}>")
    assert repr(WorkerPool()) == "<WorkerPool(None, nproc_per_node=1): not started yet>"


def speak(local_rank: int, turn: int) -> None:
    print("one", f"two {turn}", sep="\n")  # noqa: T201
    unisono.print("three", all=True)
    os.write(2, b"straight\n")
    if turn == 19:
        print("without an end", end="", file=sys.stderr)  # noqa: T201


@pytest.fixture(scope="module")
def old_pool() -> Iterator[WorkerPool]:
    """One that is older than what this process's stdout is now."""
    with WorkerPool("gloo", nproc_per_node=2) as made:
        made.run(abs)
        yield made


def test_output_is_there_with_its_rank_when_the_call_returns(
    old_pool: WorkerPool, capfd: pytest.CaptureFixture[str]
) -> None:
    for turn in range(20):
        old_pool.run(speak, turn)
        out, err = capfd.readouterr()
        words = ("one", "three", f"two {turn}")
        assert sorted(out.splitlines()) == [f"[rank {r}] {word}" for r in (0, 1) for word in words]
        assert err.count("straight\n") == 2
    assert "[rank 0] without an end" in err


def test_output_without_an_end_is_cut_into_long_lines(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(local_rank: int) -> None:
        for _ in range(100_000):
            sys.stdout.write("abcde")

    with WorkerPool("gloo") as pool:
        pool.run(speak)
    lines = capfd.readouterr().out.splitlines()
    assert {line[:9] for line in lines} == {"[rank 0] "}
    assert max(map(len, lines)) < (1 << 16) + 20
    assert sum(line.count("b") for line in lines) == 100_000


def test_no_replica_outlives_the_pool(tmp_path: Path) -> None:
    pool = WorkerPool("gloo", nproc_per_node=2)
    pids = pool.run(lambda local_rank: os.getpid())
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(NotInitializedError, match="closed"):
        pool.run(abs)


@pytest.mark.parametrize("backend", ["gloo", "threads"])
def test_a_pool_that_is_dropped_ends_its_replicas(backend: str) -> None:
    before = {*threading.enumerate()}
    pool = WorkerPool(backend, nproc_per_node=2)
    pids = pool.run(lambda local_rank: os.getpid())
    threads = {*threading.enumerate()} - before
    assert threads
    del pool
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert {*threading.enumerate()} <= before
    assert backend == "threads" or not gone(pids, 10)


def test_bad_input_is_refused_before_anything_starts() -> None:
    with pytest.raises(ArgumentError):
        WorkerPool("gloo", nproc_per_node=0)
    with pytest.raises(ArgumentError, match="deadline_s"):
        WorkerPool("gloo", deadline_s=-1)
    with pytest.raises(ArgumentError, match="join"):
        WorkerPool("gloo", join=False)  # type: ignore[call-arg]
    for elsewhere in ({"nnodes": 2}, {"hosts": "one:1,two:1"}, {"launcher": "slurm"}):
        with pytest.raises(ArgumentError, match=rf"{next(iter(elsewhere))}=.*on this host.*spawn"):
            WorkerPool("gloo", **elsewhere)
    with WorkerPool("gloo", nnodes=1) as pool:
        assert pool.run(facts, 1) == [(0, 1, 1)]
    with WorkerPool("gloo") as pool, pytest.raises(ArgumentError, match="callable"):
        pool.run(3)  # type: ignore[arg-type]
    with pytest.raises(UnknownBackendError, match="gloo"):
        WorkerPool("glo")
    with pytest.raises(ArgumentError, match="timeot"):
        WorkerPool("gloo", timeot=3)  # type: ignore[call-arg]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_told_that_the_pool_is_not_its_own() -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        first = pool.run(ident)

        def look() -> None:
            for call in (partial(pool.run, abs), partial(pool.map, abs, [1])):
                with pytest.raises(ContextError, match="is a fork of process"):
                    call()
            pool.close()

        assert in_fork(look) == 0
        assert pool.run(ident) == first
