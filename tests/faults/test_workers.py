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
from _faults import FAULTS, HANGS
from _witness import SOURCES

import unisono
from _measures import Clock, Table
from unisono import Parallel, WorkerPool
from unisono.errors import CollectiveTimeoutError, WorkerFailedError

SIZE = 3
AT_MOST_S = 1.0
TIMEOUT_S = 3.0


def by_spawn(fn: Callable[[int], Any], **options: Any) -> Any:
    return unisono.spawn("gloo", fn, nproc_per_node=SIZE, **{"timeout": 60, **options})


def by_parallel(fn: Callable[[int], Any]) -> Any:
    with Parallel("gloo", nproc_per_node=SIZE) as parallel:
        return parallel.run(fn)


def by_pool(fn: Callable[[int], Any], **options: Any) -> Any:
    with WorkerPool("gloo", nproc_per_node=SIZE, **{"timeout": 60, **options}) as pool:
        pool.run(abs)
        try:
            return pool.run(fn)
        except WorkerFailedError as error:
            vars(error)["seen"] = time.monotonic()
            assert pool.run(abs) == [0, 1, 2]  # it is as good as new
            raise


RUNNERS: dict[str, Callable[..., Any]] = {
    "spawn": by_spawn,
    "Parallel": by_parallel,
    "WorkerPool": by_pool,
}
WAYS = [
    *[("spawn", fault, victim) for fault in FAULTS for victim in (0, 2)],
    *[("WorkerPool", fault, 1) for fault in FAULTS],
    *[("Parallel", fault, 1) for fault in ("raises", "SIGKILL")],
]


def told(error: WorkerFailedError, clock: Clock) -> float:
    seen: float = vars(error).get("seen", time.monotonic())
    return seen - float(Path(clock.path).read_text())


@pytest.mark.parametrize(("runner", "fault", "victim"), WAYS)
def test_a_fault_while_others_wait(
    runner: str, fault: str, victim: int, clock: Clock, table: Table
) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == victim:
            clock.strike()
            FAULTS[fault].do()
        unisono.all_reduce(torch.ones(1))

    with pytest.raises(WorkerFailedError) as caught:
        RUNNERS[runner](fn)
    seconds = told(caught.value, clock)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(f"rank {victim} of {SIZE} ")
    assert FAULTS[fault].says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 20
    table.add(f"{runner}: {fault} while others wait", seconds, AT_MOST_S, first)


class Bomb:
    """What goes off where it is unpickled, on one rank: before the context is there."""

    def __init__(self, do: Callable[[], Any], path: str) -> None:
        self.do, self.path = do, path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.environ.get("RANK") == "1":
            Clock(self.path).strike()
            self.do()

    def __call__(self, local_rank: int) -> None:
        unisono.barrier()


@pytest.mark.parametrize("fault", ["raises", "os._exit(3)", "SIGKILL"])
def test_a_fault_before_the_context_is_there(fault: str, clock: Clock, table: Table) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        by_spawn(Bomb(FAULTS[fault].do, clock.path))
    seconds = told(caught.value, clock)
    assert f"rank 1 of {SIZE} {FAULTS[fault].says}" in str(caught.value)
    table.add(f"spawn: {fault} before set-up", seconds, AT_MOST_S, str(caught.value))


@pytest.mark.parametrize("fault", ["raises", "os._exit(3)", "SIGSEGV"])
def test_a_fault_after_the_last_collective(fault: str, clock: Clock, table: Table) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            FAULTS[fault].do()

    with pytest.raises(WorkerFailedError) as caught:
        by_spawn(fn)
    seconds = told(caught.value, clock)
    assert f"rank 1 of {SIZE} {FAULTS[fault].says}" in str(caught.value)
    table.add(f"spawn: {fault} after the last collective", seconds, AT_MOST_S, str(caught.value))


@pytest.mark.parametrize("fault", ["raises", "os._exit(3)", "SIGKILL"])
def test_a_fault_in_finalize(fault: str, clock: Clock, table: Table) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:

            def end() -> None:
                clock.strike()
                FAULTS[fault].do()

            vars(dist)["destroy_process_group"] = end

    with pytest.raises(WorkerFailedError) as caught:
        by_spawn(fn)
    seconds = told(caught.value, clock)
    assert f"rank 1 of {SIZE} {FAULTS[fault].says}" in str(caught.value)
    table.add(f"spawn: {fault} in finalize", seconds, AT_MOST_S, str(caught.value))


def test_two_ranks_that_die_at_once(clock: Clock, table: Table) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank != 1:
            clock.strike()
            os.kill(os.getpid(), signal.SIGKILL)
        unisono.barrier()

    with pytest.raises(WorkerFailedError, match="was ended by SIGKILL") as caught:
        by_spawn(fn)
    seconds = told(caught.value, clock)
    assert caught.value.rank in (0, 2)
    table.add("spawn: two ranks die at once", seconds, AT_MOST_S, str(caught.value))


@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.parametrize("runner", ["spawn", "WorkerPool"])
def test_a_rank_that_hangs_is_named_at_the_deadline(
    runner: str, hang: str, clock: Clock, table: Table
) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            HANGS[hang].do()
        unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        RUNNERS[runner](fn, timeout=TIMEOUT_S)
    seconds = told(caught.value, clock)
    text = str(caught.value)
    assert "CollectiveTimeoutError" in text
    assert "rank 1 (pid " in text
    assert HANGS[hang].says in text
    named = next(line for line in text.splitlines() if "did not come" in line)
    table.add(f"{runner}: {hang}, timeout {TIMEOUT_S:g} s", seconds, TIMEOUT_S + 1, named)


@pytest.mark.parametrize("hang", ["SIGSTOP", "a loop in Python"])
def test_a_rank_that_never_comes_to_the_data_plane_is_named(
    hang: str, clock: Clock, table: Table
) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            HANGS[hang].do()
        unisono.all_reduce(torch.ones(300_000))

    with pytest.raises(WorkerFailedError) as caught:
        by_spawn(fn, timeout=TIMEOUT_S)
    seconds = told(caught.value, clock)
    text = str(caught.value)
    assert "all_reduce SUM timed out" in text
    named = next(line for line in text.splitlines() if "did not come" in line)
    assert "rank 1 (pid " in named
    assert "rank 2 (pid " not in text
    assert HANGS[hang].says in text
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
    table.add("WorkerPool: SIGSTOP, deadline_s 3", seconds, TIMEOUT_S + 1, str(caught.value))


def test_an_exit_handler_that_hangs_costs_seconds_and_no_result(table: Table) -> None:
    def fn(local_rank: int) -> int:
        if local_rank == 1:
            atexit.register(signal.pause)
        return local_rank

    start = time.monotonic()
    assert by_spawn(fn) == [0, 1, 2]
    table.add("spawn: an exit handler hangs", time.monotonic() - start, 9, "(no error)")


def test_a_hundred_failures_are_a_hundred_originals_and_nothing_grows(
    clock: Clock, table: Table
) -> None:
    def fn(local_rank: int, turn: int) -> NoReturn:
        if local_rank == 1:
            clock.strike()
            raise ArithmeticError(turn)
        unisono.barrier()
        raise AssertionError("a barrier without rank 1")

    process = psutil.Process()
    sizes = []
    for turn in range(100):
        with pytest.raises(WorkerFailedError, match="raised ArithmeticError") as caught:
            unisono.spawn("gloo", fn, (turn,), nproc_per_node=2)
        seconds = clock.since()
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, ArithmeticError)
        assert caught.value.__cause__.args == (turn,)
        table.add("spawn: 100 failures, the slowest", seconds, AT_MOST_S, str(caught.value))
        sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    memory, descriptors, threads = (
        last - first for first, last in zip(sizes[20], sizes[-1], strict=True)
    )
    assert (descriptors, threads) == (0, 0)
    assert memory < 8 << 20, f"80 jobs took {memory} bytes"


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
