"""A replica that fails, in whatever way, is named with its own cause, and nothing is left."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
import torch.distributed as dist

import unisono
from tests.support.faults import FAULTS, HANGS
from tests.support.measures import Clock, Table, says_little
from tests.support.processes import SOURCES, say
from tests.support.ways import SIZE, Way, check_error, launcher_rank, told
from unisono import WorkerPool
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError

AT_MOST_S = 1.0
TIMEOUT_S = 3.0
LIBRARIES = ("mpi4py", "horovod")
SPAWN, POOL, PARALLEL = Way("spawn"), Way("WorkerPool"), Way("Parallel")
# All faults on all backends; each way and each victim on each backend.
WAYS = [
    *[(SPAWN, fault, victim) for fault in FAULTS for victim in (0, 2)],
    *[(POOL, fault, 1) for fault in FAULTS],
    *[(PARALLEL, fault, i % SIZE) for i, fault in enumerate(FAULTS)],
    *[
        (Way(("spawn", "spawn", "Parallel", "WorkerPool")[i % 4], backend), fault, i % SIZE)
        for backend in LIBRARIES
        for i, fault in enumerate((*FAULTS, "raises", "SIGKILL"))
    ],
]
MOMENTS = [
    *[(SPAWN, fault) for fault in ("raises", "os._exit(3)", "SIGKILL", "SIGSEGV")],
    (PARALLEL, "raises"),
    *[(Way("spawn", backend), fault) for backend in LIBRARIES for fault in ("raises", "SIGKILL")],
]
SPAWNS = [SPAWN, *[Way("spawn", backend) for backend in LIBRARIES]]
# horovodrun says nothing of a rank that ends with 0: a second is waited for a failure that is.
SLOWER_S = {("horovod", "os._exit(0)"): 2.0}


def limit_s(way: Way, fault: str) -> float:
    return SLOWER_S.get((way.backend, fault), AT_MOST_S)


@pytest.mark.parametrize(("way", "fault", "victim"), WAYS, ids=str)
def test_a_fault_while_others_wait(
    way: Way, fault: str, victim: int, clock: Clock, table: Table
) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == victim:
            clock.strike()
            FAULTS[fault].do()
        unisono.all_reduce(torch.ones(1))

    with pytest.raises(WorkerFailedError) as caught:
        way.run(fn)
    seconds = told(caught.value, clock)
    first = check_error(caught.value, victim, FAULTS[fault].says)
    table.add(f"{way}: {fault} while others wait", seconds, limit_s(way, fault), first)


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


@pytest.mark.parametrize(("way", "fault"), MOMENTS, ids=str)
def test_a_fault_before_the_context_is_there(
    way: Way, fault: str, clock: Clock, table: Table
) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        way.run(Bomb(FAULTS[fault].do, clock.path))
    seconds = told(caught.value, clock)
    first = check_error(caught.value, 1, FAULTS[fault].says)
    table.add(f"{way}: {fault} before set-up", seconds, AT_MOST_S, first)


@pytest.mark.parametrize(("way", "fault"), MOMENTS, ids=str)
def test_a_fault_after_the_last_collective(
    way: Way, fault: str, clock: Clock, table: Table
) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            FAULTS[fault].do()

    with pytest.raises(WorkerFailedError) as caught:
        way.run(fn)
    seconds = told(caught.value, clock)
    first = check_error(caught.value, 1, FAULTS[fault].says)
    table.add(f"{way}: {fault} after the last collective", seconds, AT_MOST_S, first)


@pytest.mark.parametrize(("way", "fault"), MOMENTS, ids=str)
def test_a_fault_in_finalize(way: Way, fault: str, clock: Clock, table: Table) -> None:
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

    with pytest.raises(WorkerFailedError) as caught:
        way.run(fn)
    seconds = told(caught.value, clock)
    first = check_error(caught.value, 1, FAULTS[fault].says)
    table.add(f"{way}: {fault} in finalize", seconds, AT_MOST_S, first)


@pytest.mark.parametrize("way", [*SPAWNS, PARALLEL, POOL], ids=str)
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


STUCK = [
    *[(way, hang) for hang in HANGS for way in (SPAWN, POOL)],
    (PARALLEL, "SIGSTOP"),
    (Way("spawn", "horovod"), "SIGSTOP"),
    (Way("WorkerPool", "horovod"), "a call in C that holds the GIL"),
]


def named_late(error: WorkerFailedError, rank: int, says: str) -> str:
    """Fail for an error that doesn't name a late rank and its state; give the line that does."""
    text = str(error)
    assert "CollectiveTimeoutError" in text
    assert f"rank {rank} never came" in text
    assert says in text
    says_little(text, error.traceback)
    says_little(str(error.__cause__), None)
    return next(line for line in text.splitlines() if "never came" in line)


@pytest.mark.parametrize(("way", "hang"), STUCK, ids=str)
def test_a_rank_that_hangs_is_named_at_the_deadline(
    way: Way, hang: str, clock: Clock, table: Table
) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            HANGS[hang].do()
        unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        way.run(fn, timeout=TIMEOUT_S)
    seconds = told(caught.value, clock)
    named = named_late(caught.value, 1, HANGS[hang].says)
    table.add(f"{way}: {hang}, timeout {TIMEOUT_S:g} s", seconds, TIMEOUT_S + 1, named)


@pytest.mark.parametrize(
    ("runner", "hang"), [("spawn", "SIGSTOP"), ("WorkerPool", "a call in C that holds the GIL")]
)
def test_a_rank_that_hangs_under_mpi_ends_the_job_at_the_deadline(
    runner: str, hang: str, clock: Clock, table: Table
) -> None:
    """The error names the call, its line, and who isn't in it, though not where that is."""
    way = Way(runner, "mpi4py")

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 0:
            clock.strike()
            HANGS[hang].do()
        unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        way.run(fn, timeout=TIMEOUT_S)
    seconds = told(caught.value, clock)
    error = caught.value.__cause__
    assert isinstance(error, CollectiveTimeoutError)
    assert caught.value.rank != 0
    assert "over ranks [0, 1, 2] at " in str(error)
    assert "rank 0 never came" in str(error)
    assert str(error).count("never came") == 1
    says_little(str(caught.value), caught.value.traceback)
    table.add(f"{way}: {hang}, timeout {TIMEOUT_S:g} s", seconds, TIMEOUT_S + 1, str(error))


@pytest.mark.parametrize("hang", ["SIGSTOP", "a loop in Python"])
def test_a_rank_that_never_comes_to_the_data_plane_is_named(
    hang: str, clock: Clock, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")
    monkeypatch.setenv("UNISONO_DEBUG", "0")  # else it is missed before, where calls are compared

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            HANGS[hang].do()
        unisono.all_reduce(torch.ones(300_000))

    with pytest.raises(WorkerFailedError) as caught:
        SPAWN.run(fn, timeout=TIMEOUT_S)
    seconds = told(caught.value, clock)
    assert " of 3: all_reduce SUM: " in str(caught.value)
    named = named_late(caught.value, 1, HANGS[hang].says)
    assert "rank 2 never came" not in str(caught.value)
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


class Clinging:
    """It hangs as it is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __del__(self) -> None:
        self.clock.strike()
        signal.pause()


@pytest.mark.parametrize("way", [SPAWN, POOL], ids=str)
def test_a_del_that_hangs_is_named_at_the_deadline(way: Way, clock: Clock, table: Table) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            Clinging(clock)
        unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        way.run(fn, timeout=TIMEOUT_S)
    seconds = told(caught.value, clock)
    named = named_late(caught.value, 1, ": it is at")
    table.add(f"{way}: a __del__ hangs, timeout {TIMEOUT_S:g} s", seconds, TIMEOUT_S + 1, named)


HUNDRED = {fault: FAULTS[fault] for fault in ("raises", "os._exit(3)", "SIGKILL", "SIGSEGV")}


def test_a_hundred_failures_are_a_hundred_originals_and_nothing_grows(
    clock: Clock, table: Table
) -> None:
    """Of both ranks and of four kinds in turns."""

    def fn(local_rank: int, fault: str, victim: int) -> NoReturn:
        if local_rank == victim:
            clock.strike()
            HUNDRED[fault].do()
        unisono.barrier()
        raise AssertionError(f"a barrier without rank {victim}")

    process = psutil.Process()
    sizes = []
    for turn in range(25):
        for i, fault in enumerate(HUNDRED):
            victim = (turn + i) % 2
            with pytest.raises(WorkerFailedError) as caught:
                unisono.spawn("gloo", fn, (fault, victim), nproc_per_node=2)
            seconds = clock.since()
            first = check_error(caught.value, victim, HUNDRED[fault].says, 2)
            assert isinstance(caught.value.__cause__, ArithmeticError) == (fault == "raises")
            table.add("spawn: 100 failures, the slowest", seconds, AT_MOST_S, first)
            sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    memory, descriptors, threads = (
        last - first for first, last in zip(sizes[20], sizes[-1], strict=True)
    )
    assert (descriptors, threads) == (0, 0)
    assert memory < 8 << 20, f"80 jobs took {memory} bytes"


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
    for _ in range(100):
        sys.stdout.write(("x" * 1023 + "\\n") * 1024)
    unisono.barrier()
    if local_rank == 1:
        raise ArithmeticError("after 100 MB")

try:
    {call}
except unisono.errors.WorkerFailedError as error:
    sys.stderr.write(str(error).splitlines()[0])
"""
CALLS = {
    "spawn": "unisono.spawn('gloo', speak, nproc_per_node=2)",
    "WorkerPool": "with unisono.WorkerPool('gloo', 2) as pool: pool.run(speak)",
}


@pytest.mark.parametrize("runner", CALLS)
def test_a_hundred_megabytes_of_output(runner: str, table: Table) -> None:
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", LOUD.format(call=CALLS[runner])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCES},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        count = 0
        while part := process.stdout.read(1 << 20):
            count += part.count(b"x")
        said = process.stderr.read().decode()
    assert count == 2 * 100 * 1024 * 1023
    assert "rank 1 of 2 raised ArithmeticError: after 100 MB" in said
    table.add(f"{runner}: 100 MB of output, then raises", time.monotonic() - start, 30, said)
