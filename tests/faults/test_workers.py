"""A replica that fails, in whatever way, is named with its own cause, and nothing is left."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

import unisono
from tests.support.faults import FAULTS, HANGS
from tests.support.measures import Clock, Table, says_little
from tests.support.processes import python, say
from tests.support.requirements import require_backend
from tests.support.ways import SIZE, Way, check_error, launcher_rank, told
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError

AT_MOST_S = 1.0
TIMEOUT_S = 3.0
LIBRARIES = ("mpi4py", "horovod")
SPAWN, POOL, PARALLEL = Way("spawn"), Way("WorkerPool"), Way("Parallel")
# Every fault by spawn; another way has one of each kind: a report, an exit code, a signal.
KINDS = ("raises", "os._exit(0)", "SIGKILL", "exception that can't be pickled")
RUNNERS = ("spawn", "Parallel", "spawn", "WorkerPool")
WAYS = [
    *[(SPAWN, fault, i % SIZE) for i, fault in enumerate(FAULTS)],
    *[(POOL, fault, 1) for fault in KINDS],
    (PARALLEL, "raises", 0),
    *[
        (Way(RUNNERS[i], backend), fault, i % SIZE)
        for backend in LIBRARIES
        for i, fault in enumerate(KINDS)
    ],
]
ON_LIBRARIES = [Way("spawn", backend) for backend in LIBRARIES]
# horovodrun says nothing of a rank that ends with 0: a second is waited for a failure that is.
SLOWER_S = {("horovod", "os._exit(0)"): 2.0}


def at_a_moment(fault: str) -> pytest.MarkDecorator:
    """Let spawn meet three kinds of fault, and each library one."""
    ways = [(SPAWN, each) for each in ("raises", "os._exit(3)", "SIGKILL")]
    ways += [(way, fault) for way in ON_LIBRARIES]
    return pytest.mark.parametrize(("way", "fault"), ways, ids=str)


@dataclass
class Check:
    """Runs what fails, and holds the error to its cause and its limit."""

    clock: Clock
    table: Table

    def __call__(
        self, way: Way, fault: str, when: str, fn: Callable[[int], Any], victim: int = 1
    ) -> None:
        with pytest.raises(WorkerFailedError) as caught:
            way.run(fn)
        seconds = told(caught.value, self.clock)
        first = check_error(caught.value, victim, FAULTS[fault].says)
        limit_s = SLOWER_S.get((way.backend, fault), AT_MOST_S)
        self.table.add(f"{way}: {fault} {when}", seconds, limit_s, first)


@pytest.fixture
def check(clock: Clock, table: Table) -> Check:
    return Check(clock, table)


@pytest.mark.parametrize(("way", "fault", "victim"), WAYS, ids=str)
def test_a_fault_while_others_wait(way: Way, fault: str, victim: int, check: Check) -> None:
    clock = check.clock

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == victim:
            clock.strike()
            FAULTS[fault].do()
        unisono.all_reduce(torch.ones(1))

    check(way, fault, "while others wait", fn, victim)


class Bomb:
    """What goes off where it is unpickled, on one rank: before the context is there."""

    def __init__(self, do: Callable[[], Any], path: str) -> None:
        self.do, self.path = do, path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if launcher_rank() == 1:
            Clock(self.path).strike()
            self.do()

    def __call__(self, local_rank: int) -> None:
        unisono.barrier()


@at_a_moment("raises")
def test_a_fault_before_the_context_is_there(way: Way, fault: str, check: Check) -> None:
    check(way, fault, "before set-up", Bomb(FAULTS[fault].do, check.clock.path))


@at_a_moment("SIGKILL")
def test_a_fault_after_the_last_collective(way: Way, fault: str, check: Check) -> None:
    clock = check.clock

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            FAULTS[fault].do()

    check(way, fault, "after the last collective", fn)


@at_a_moment("raises")
def test_a_fault_in_finalize(way: Way, fault: str, check: Check) -> None:
    clock = check.clock

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:

            def end(self: object = None) -> None:
                clock.strike()
                FAULTS[fault].do()

            if way.backend == "gloo":
                vars(dist)["destroy_process_group"] = end
            else:
                setattr(type(unisono.context.current_model()), "finalize", end)  # noqa: B010

    check(way, fault, "in finalize", fn)


@pytest.mark.parametrize("way", [SPAWN, POOL, *ON_LIBRARIES], ids=str)
def test_two_ranks_that_die_at_once(way: Way, clock: Clock, table: Table) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank != 1:
            clock.strike()
            os.kill(os.getpid(), signal.SIGKILL)
        unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        way.run(fn)
    seconds = told(caught.value, clock)
    assert caught.value.rank in (0, 2)
    first = check_error(caught.value, caught.value.rank, "was ended by SIGKILL")
    table.add(f"{way}: two ranks die at once", seconds, AT_MOST_S, first)


STUCK = {
    SPAWN: list(HANGS),
    POOL: ["SIGSTOP", "a call in C that holds the GIL"],
    Way("spawn", "horovod"): ["SIGSTOP"],
    Way("WorkerPool", "horovod"): ["a call in C that holds the GIL"],
}


Late = Callable[..., Iterator[tuple[str, float, WorkerFailedError]]]


@pytest.fixture
def late(tmp_path: Path) -> Late:
    """Let a rank hang in each way, in jobs that run at once: all last as long as the timeout."""

    def run_all(way: Way, hangs: list[str], call: Callable[[], Any] = unisono.barrier) -> Any:
        def run(hang: str) -> tuple[str, float, WorkerFailedError]:
            clock = Clock(str(tmp_path / hang))

            def fn(local_rank: int) -> None:
                unisono.barrier()
                if local_rank == 1:
                    clock.strike()
                    HANGS[hang].do()
                call()

            with pytest.raises(WorkerFailedError) as caught:
                way.run(fn, timeout=TIMEOUT_S)
            return hang, told(caught.value, clock), caught.value

        require_backend(way.backend)
        with ThreadPoolExecutor() as jobs:
            return jobs.map(run, hangs)

    return run_all


def named_late(error: WorkerFailedError, says: str) -> str:
    """Fail for an error that doesn't name a late rank and its state; give the line that does."""
    text = str(error)
    assert "CollectiveTimeoutError" in text
    assert "rank 1 never came" in text
    assert says in text
    says_little(text, error.traceback)
    says_little(str(error.__cause__), None)
    return next(line for line in text.splitlines() if "never came" in line)


@pytest.mark.parametrize("way", STUCK, ids=str)
def test_a_rank_that_hangs_is_named_at_the_deadline(way: Way, late: Late, table: Table) -> None:
    for hang, seconds, error in late(way, STUCK[way]):
        named = named_late(error, HANGS[hang].says)
        table.add(f"{way}: {hang}, timeout {TIMEOUT_S:g} s", seconds, TIMEOUT_S + 1, named)


def test_a_rank_that_is_stopped_under_mpi_ends_the_job_at_the_deadline(
    late: Late, table: Table
) -> None:
    """The error names the call, its line, and who isn't in it, though not where that is."""
    way = Way("spawn", "mpi4py")
    ((hang, seconds, error),) = late(way, ["SIGSTOP"])
    cause = error.__cause__
    assert isinstance(cause, CollectiveTimeoutError)
    assert error.rank != 1
    assert "over ranks [0, 1, 2] at " in str(cause)
    assert "rank 1 never came" in str(cause)
    assert str(cause).count("never came") == 1
    says_little(str(error), error.traceback)
    table.add(f"{way}: {hang}, timeout {TIMEOUT_S:g} s", seconds, TIMEOUT_S + 1, str(cause))


def test_a_rank_that_never_comes_to_the_data_plane_is_named(
    late: Late, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")
    monkeypatch.setenv("UNISONO_DEBUG", "0")  # else it is missed before, where calls are compared
    call = lambda: unisono.all_reduce(torch.ones(300_000))  # noqa: E731
    for hang, seconds, error in late(SPAWN, ["SIGSTOP", "a loop in Python"], call):
        assert " of 3: all_reduce SUM: " in str(error)
        named = named_late(error, HANGS[hang].says)
        assert "rank 2 never came" not in str(error)
        table.add(f"spawn: {hang}, large tensors, timeout 3 s", seconds, TIMEOUT_S + 1, named)


def test_a_call_over_the_pools_deadline(clock: Clock, table: Table) -> None:
    def stall(local_rank: int) -> None:
        if local_rank == 1:
            clock.strike()
            os.kill(os.getpid(), signal.SIGSTOP)

    with WorkerPool("gloo", nproc_per_node=SIZE, deadline_s=TIMEOUT_S) as pool:
        pool.run(abs)
        with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] of 3") as caught:
            pool.run(stall)
        seconds = clock.since()
    says_little(str(caught.value), None)
    table.add("WorkerPool: SIGSTOP, deadline_s 3", seconds, TIMEOUT_S + 1, str(caught.value))


def test_an_exit_handler_that_hangs_is_waited_for_as_long_as_the_user_says(table: Table) -> None:
    def fn(local_rank: int) -> int:
        if local_rank == 1:
            atexit.register(signal.pause)
        return local_rank

    start = time.monotonic()
    job = unisono.spawn("gloo", fn, nproc_per_node=3, join=False)
    with pytest.raises(LaunchError, match=r"ranks \[1\] haven't finished") as caught:
        job.join(TIMEOUT_S)
    job.terminate()
    seconds = time.monotonic() - start
    table.add("spawn: an exit handler hangs, timeout 3 s", seconds, 9.0, str(caught.value))


KILLERS = {fault: FAULTS[fault] for fault in ("raises", "os._exit(3)", "SIGKILL", "SIGSEGV")}


def test_forty_failures_are_forty_originals_and_nothing_grows(clock: Clock, table: Table) -> None:
    """Of both ranks and of four kinds in turns."""

    def fn(local_rank: int, fault: str, victim: int) -> NoReturn:
        if local_rank == victim:
            clock.strike()
            KILLERS[fault].do()
        unisono.barrier()
        raise AssertionError(f"a barrier without rank {victim}")

    process = psutil.Process()
    sizes = []
    for turn in range(10):
        for i, fault in enumerate(KILLERS):
            victim = (turn + i) % 2
            with pytest.raises(WorkerFailedError) as caught:
                unisono.spawn("gloo", fn, (fault, victim), nproc_per_node=2)
            seconds = clock.since()
            first = check_error(caught.value, victim, KILLERS[fault].says, 2)
            assert isinstance(caught.value.__cause__, ArithmeticError) == (fault == "raises")
            table.add("spawn: 40 failures, the slowest", seconds, AT_MOST_S, first)
            sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    memory, descriptors, threads = (
        last - first for first, last in zip(sizes[8], sizes[-1], strict=True)
    )
    assert (descriptors, threads) == (0, 0)
    assert memory < 4 << 20, f"32 jobs took {memory} bytes"


def test_rank_0_leaves_first_and_the_others_go_on(tmp_path: Path) -> None:
    """It is its parent that hosts the rendezvous: a group is made when rank 0 is long gone."""

    def fn(local_rank: int, left: str) -> Any:
        group = unisono.new_group([1, 2])
        unisono.barrier()
        if local_rank == 0:
            unisono.finalize()
            say(left, "gone")
            return None
        if local_rank == 1:
            Path(left).read_text()
        unisono.barrier(group=group)
        return unisono.all_gather(local_rank, group=group)

    os.mkfifo(tmp_path / "left")
    assert SPAWN.run(fn, str(tmp_path / "left")) == [None, [1, 2], [1, 2]]


def test_150_mib_of_one_rank_arrive(table: Table) -> None:
    def fn(local_rank: int) -> Any:
        unisono.barrier()
        start = time.monotonic()
        found = unisono.all_gather(bytes(150 << 20) if local_rank == 1 else b"")
        return time.monotonic() - start, [len(each) for each in found]

    results = SPAWN.run(fn)
    assert [sizes for _, sizes in results] == [[0, 150 << 20, 0]] * SIZE
    seconds = max(seconds for seconds, _ in results)
    table.add("spawn: 150 MiB from one of three ranks", seconds, 3.5, "(no error)")


LOUD = """
import sys, unisono

def speak(local_rank):
    for _ in range(20):
        sys.stdout.write(("x" * 1023 + "\\n") * 1024)
    unisono.barrier()
    if local_rank == 1:
        raise ArithmeticError("after 20 MB")

def by_pool():
    with unisono.WorkerPool("gloo", 2) as pool:
        pool.run(speak)

for call in (lambda: unisono.spawn("gloo", speak, nproc_per_node=2), by_pool):
    try:
        call()
    except unisono.errors.WorkerFailedError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
"""


def test_megabytes_of_output(table: Table) -> None:
    start = time.monotonic()
    done = python("-c", LOUD)
    assert done.stdout.count("x") == 2 * 2 * 20 * 1024 * 1023
    assert done.stderr == "rank 1 of 2 raised ArithmeticError: after 20 MB\n" * 2
    seconds = time.monotonic() - start
    table.add("spawn, WorkerPool: 20 MB of output, then raises", seconds, 30, done.stderr)
