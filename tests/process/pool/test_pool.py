"""Warm replicas: many calls, calls that fail, replicas that die."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import unisono
from tests.support.faults import HANGS
from tests.support.processes import gone, in_fork, until
from unisono import WorkerPool, lifecycle
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
from unisono.launchers.job.channel import peek
from unisono.pool import replicas, worker
from unisono.pool.pool import outcome

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
def test_every_call_runs_in_every_replica_and_map_in_the_order_of_items(pool: WorkerPool) -> None:
    assert pool.run(facts, 1, step=1) == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]
    assert pool.run(lambda local_rank: torch.full((2,), local_rank).tolist())[2] == [2, 2]
    assert pool.map(lambda x: x * x, range(50)) == [x * x for x in range(50)]
    assert pool.map(abs, []) == []
    assert pool.map(abs, [-1]) == [1]


def ident(local_rank: int) -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def fail(local_rank: int, others: Callable[[], object]) -> None:
    if local_rank == 1:
        raise KeyError("missing")
    others()


@unisono.one_rank_only(rank=1, with_barrier=True)
def fail_in_a_section() -> None:
    raise KeyError("missing")


def fail_first(local_rank: int) -> None:
    with unisono.one_rank_first(rank=1):
        raise KeyError("missing")


def differ(local_rank: int) -> Any:
    return unisono.barrier() if local_rank else unisono.all_gather(1)


MISSING = "raised KeyError: 'missing'"
FAILING: list[tuple[Callable[[int], Any], type[Exception], str]] = [
    (lambda rank: fail(rank, int), KeyError, f"rank 1 of 3 {MISSING}"),
    (lambda rank: fail(rank, lambda: compute(0.3)), KeyError, f"rank 1 of 3 {MISSING}"),
    (lambda _: fail_in_a_section(), Exception, f"rank 1 {MISSING}"),
    (fail_first, Exception, f"rank 1 {MISSING}"),
    (differ, CollectiveMismatchError, "CollectiveMismatchError"),
]


def test_a_call_that_fails_leaves_the_pool_as_it_is(pool: WorkerPool) -> None:
    before = pool.run(ident)
    for call, cause, text in FAILING:
        with pytest.raises(WorkerFailedError, match=text) as caught:
            pool.run(call)
        assert isinstance(caught.value.__cause__, cause)
        if cause is KeyError:
            assert caught.value.rank == 1
            assert "in fail" in caught.value.traceback
        assert pool.run(ident) == before
    with pytest.raises(WorkerFailedError, match="ZeroDivisionError"):
        pool.map(lambda x: 1 // x, [1, 0, 2])
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


def test_ranks_out_of_step_get_a_new_context_whatever_they_raise(fresh: WorkerPool) -> None:
    def hide(local_rank: int) -> None:
        if local_rank:
            return
        try:
            with unisono.deadline(0.2):
                unisono.barrier()
        except CollectiveTimeoutError:
            raise KeyError("mine") from None

    def leave_waiting(local_rank: int) -> None:
        fail(local_rank, unisono.barrier)

    fresh.run(facts, 1)
    for call, text in (
        (hide, "rank 0 of 3 raised KeyError: 'mine'"),
        (leave_waiting, "rank 1 of 3 raised KeyError"),
    ):
        before, start = fresh._replicas, time.monotonic()
        with pytest.raises(WorkerFailedError, match=text):
            fresh.run(call)
        assert time.monotonic() - start < 15
        assert fresh.run(facts, 1)[1] == (1, 3, 3)
        assert fresh._replicas is not before


def holds_and_computes() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")  # as a call in C, but without a pause


STOPS, HOLDS_THE_LOCK, COMPUTES = (
    HANGS[name].do for name in ("SIGSTOP", "a call in C that holds the GIL", "a loop in Python")
)


def test_a_call_that_raises_ends_those_that_never_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        for others in (STOPS, torch.distributed.barrier, COMPUTES, holds_and_computes):
            before = pool.run(ident)
            if others is COMPUTES:
                monkeypatch.setattr("unisono.pool.call._PATIENCE_S", 0.5)
            start = time.monotonic()
            with pytest.raises(WorkerFailedError, match="rank 1 of 2 raised KeyError"):
                pool.run(fail, others)
            assert time.monotonic() - start < SOON_S
            assert not {*pool.run(ident)} & {*before}


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
        until(lambda: peek(workers(pool)[0].status), 10)
        assert pool.run(facts, 1)[1] == (1, 2, 2)
    assert not any(psutil.pid_exists(pid) for pid in again)


def leave_a_child(local_rank: int) -> tuple[int, int]:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return os.getpid(), child


def test_a_replica_that_dies_is_replaced_though_a_child_of_it_lives() -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        left = pool.run(leave_a_child)
        try:
            os.kill(left[1][0], signal.SIGKILL)
            assert not gone([left[1][0]], 10)
            until(lambda: peek(workers(pool)[1].status), 10)
            assert pool.run(facts, 1)[1] == (1, 2, 2)
        finally:
            for _, child in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def workers(pool: WorkerPool) -> list[Any]:
    assert pool._replicas is not None
    return pool._replicas._workers.workers


def test_where_replicas_are_is_asked_of_all_within_one_time(
    processes: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, start = processes.pids, time.monotonic()
    assert processes._replicas is not None
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert processes._replicas.stacks(range(3)) == {0: [], 1: [], 2: []}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - start < 2 * replicas._STACK_S
    own = f'  File "{worker.__file__}", line 1 in _outcome\n'
    above = '  File "/tmp/caf\\xe9/\\u2603\\users.py", line 2 in work\n'
    for text, files in ((own, []), (above + own, ["/tmp/caf\xe9/\u2603\\users.py"]), (None, [])):
        monkeypatch.setattr("unisono.recording.stack_signal.ask", lambda *_, text=text: text)
        stack = processes._replicas.stacks([0])[0]
        assert [frame.filename for frame in stack] == files
        assert processes._replicas.may_wait([0]) == (text is None)


@contextlib.contextmanager
def warm(backend: str, size: int, deadline_s: float) -> Iterator[WorkerPool]:
    """Make a pool whose deadline is that of the test once its replicas are there."""
    with WorkerPool(backend, nproc_per_node=size, deadline_s=deadline_s) as pool:
        pool._deadline_s, limit = 60.0, pool._deadline_s
        pool.run(abs)
        pool._deadline_s = limit
        yield pool
        pool._deadline_s = 60.0
        assert pool.run(facts, 1) == [(rank, size, size) for rank in range(size)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_over_its_deadline_is_ended(backend: str, tmp_path: Path) -> None:
    def stall(local_rank: int, over: Path) -> None:
        if local_rank:
            unisono.barrier()
        while not over.exists():  # a thread can't be ended from outside
            pass

    with warm(backend, 2, 0.5) as pool:
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[0, 1\] of 2 after 0.5 s"):
            pool.run(stall, tmp_path / "over")
        (tmp_path / "over").touch()


def rest(local_rank: int) -> None:
    time.sleep(600)


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


def stopped(pool: WorkerPool) -> WorkerPool:
    (pid,) = pool.pids
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pool


def stop_within_the_answer(pool: WorkerPool) -> None:
    assert pool._replicas is not None
    inbox = pool._replicas._worker(0).inbox
    take = inbox.take

    def stop_first() -> Any:  # the answer is larger than what the kernel keeps for it
        inbox.take = take  # type: ignore[method-assign]
        stopped(pool)
        return take()

    inbox.take = stop_first  # type: ignore[method-assign]
    pool.run(lambda local_rank: bytes(1 << 24))


STUCK: dict[str, tuple[int, Callable[[WorkerPool], Any]]] = {
    "stopped": (1, lambda pool: pool.run(lambda _: STOPS())),
    "holds Python's lock": (2, lambda pool: pool.run(lambda _: HOLDS_THE_LOCK())),
    "reads no arguments": (1, lambda pool: stopped(pool).run(lambda *_: None, bytes(1 << 24))),
    "reads no items": (1, lambda pool: stopped(pool).map(len, [bytes(1 << 24)])),
    "stopped within its answer": (1, stop_within_the_answer),
}


@pytest.mark.parametrize("how", STUCK)
def test_replicas_that_are_all_stuck_are_ended_at_the_deadline(how: str) -> None:
    size, call = STUCK[how]
    before = {*threading.enumerate()}
    with warm("gloo", size, 1.0) as pool:
        pids, start = pool.pids, time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="their replicas are ended") as caught:
            call(pool)
        assert f"ranks {[*range(size)]} of {size}" in str(caught.value)
        assert time.monotonic() - start < SOON_S
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert {*threading.enumerate()} <= before


def stick_later(local_rank: int, folder: Path, stick: Callable[[], object]) -> None:
    def go() -> None:
        until((folder / "go").exists, 20)
        (folder / str(local_rank)).touch()
        stick()

    threading.Thread(target=go, daemon=True).start()


@pytest.mark.parametrize("stick", [HOLDS_THE_LOCK, STOPS])
def test_replicas_that_are_stuck_between_calls_are_ended_at_the_end(
    stick: Callable[[], object], tmp_path: Path
) -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        pids = pool.run(lambda local_rank: os.getpid())
        pool.run(stick_later, tmp_path, stick)
        (tmp_path / "go").touch()
        for rank in range(2):
            until((tmp_path / str(rank)).exists, 20)
        start = time.monotonic()
    assert time.monotonic() - start < SOON_S
    assert not any(psutil.pid_exists(pid) for pid in pids)


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
    pool.close()  # again
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(NotInitializedError, match="closed"):
        pool.run(abs)
    assert repr(WorkerPool()) == "<WorkerPool(None, nproc_per_node=1): not started yet>"


def speak(local_rank: int, turn: int) -> None:
    print("one", f"two {turn}", sep="\n")  # noqa: T201
    unisono.print("three", all=True)
    os.write(2, b"straight\n")
    if turn == 19:
        print("without an end", end="", file=sys.stderr)  # noqa: T201


def test_output_is_there_with_its_rank_when_the_call_returns(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with WorkerPool("gloo", nproc_per_node=3) as pool:
        for turn in range(20):
            pool.run(speak, turn)
            out, err = capfd.readouterr()
            said = ("one", "three", f"two {turn}")
            wanted = [f"[rank {rank}] {word}" for rank in range(3) for word in said]
            assert sorted(out.splitlines()) == wanted
            assert err.count("straight\n") == 3
    assert "[rank 0] without an end" in err


def test_replicas_of_torchrun_print_between_calls(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def print_later(local_rank: int, over: Path) -> None:
        def go() -> None:
            sys.stderr.write(f"{'x' * 99}\n" * 3000)  # more than a pipe takes
            over.touch()

        threading.Timer(0.5, go).start()

    with WorkerPool("gloo", launcher="torchrun") as pool:
        pool.run(print_later, tmp_path / "over")
        until((tmp_path / "over").exists, 20)
    assert capfd.readouterr().err.count("x" * 99) == 3000


def test_output_without_an_end_is_cut_into_long_lines(capfd: pytest.CaptureFixture[str]) -> None:
    def speak(local_rank: int) -> None:
        for _ in range(100_000):
            sys.stdout.write("abcde")

    with WorkerPool("gloo", nproc_per_node=2) as pool:
        pool.map(speak, [0])
    lines = capfd.readouterr().out.splitlines()
    assert len({line[:9] for line in lines}) == 1
    assert max(map(len, lines)) < (1 << 16) + 20
    assert sum(line.count("b") for line in lines) == 100_000


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_that_is_dropped_ends_its_replicas(backend: str) -> None:
    before = {*threading.enumerate()}
    pool = WorkerPool(backend, nproc_per_node=2)
    pids = pool.run(lambda local_rank: os.getpid())
    threads = {*threading.enumerate()} - before
    assert bool(threads) == (backend == "threads")
    del pool
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert {*threading.enumerate()} <= before
    assert backend == "threads" or not gone(pids, 10)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_pool_of_threads_is_dropped_though_a_fork_of_this_process_lives() -> None:
    before = {*threading.enumerate()}
    pool = WorkerPool("threads", nproc_per_node=2)
    pool.run(ident)
    threads = {*threading.enumerate()} - before

    with beside_a_fork():
        del pool
        gc.collect()
        for thread in threads:
            thread.join(10)
        assert {*threading.enumerate()} <= before


@contextlib.contextmanager
def beside_a_fork() -> Iterator[None]:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(theirs)
        os.close(ours)
        os.waitpid(child, 0)


def theirs(entry: Any, plan: Any, *, environ: Any = None) -> list[Any]:
    raise AssertionError


def test_bad_input_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"nproc_per_node": 0, "deadline_s": -1, "join": False, "timeot": 3}
    for name, value in wrong.items():
        with pytest.raises(ArgumentError, match=name):
            WorkerPool("gloo", **{name: value})  # type: ignore[arg-type]
    restarts: Any = {"max_restarts": 1}
    for more in (restarts, {"launcher": "torchrun", "launcher_options": restarts}, {"join": True}):
        with pytest.raises(ArgumentError, match=r"a pool takes no (\w+): .*; leave \1 out"):
            WorkerPool("gloo", **more)
    for elsewhere in ({"nnodes": 2}, {"hosts": "one:1,two:1"}, {"launcher": "slurm"}):
        with pytest.raises(ArgumentError, match=rf"{next(iter(elsewhere))}=.*on this host.*spawn"):
            WorkerPool("gloo", **elsewhere)
    monkeypatch.setattr(lifecycle, "find_launcher", lambda _: theirs)
    with pytest.raises(ArgumentError, match="launcher 'theirs' makes no replicas that stay"):
        WorkerPool("gloo", launcher="theirs")
    monkeypatch.undo()
    with WorkerPool("gloo", nnodes=1) as pool:
        assert pool.run(facts, 1) == [(0, 1, 1)]
    with WorkerPool("gloo") as pool, pytest.raises(ArgumentError, match="callable"):
        pool.run(3)  # type: ignore[arg-type]
    with pytest.raises(UnknownBackendError, match="gloo"):
        WorkerPool("glo")


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_told_that_the_pool_is_not_its_own() -> None:
    with WorkerPool("gloo", nproc_per_node=2) as pool:
        first = pool.run(ident)

        def look() -> None:
            for call in (partial(pool.run, abs), partial(pool.map, abs, [1])):
                with pytest.raises(ContextError, match="is a fork of process"):
                    call()
            with pytest.raises(ContextError, match="is a fork of process"):
                outcome(pool, abs, ())
            pool.close()

        assert in_fork(look) == 0
        assert pool.run(ident) == first
