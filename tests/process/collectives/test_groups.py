"""Groups as communicators of their own: beside each other, and with a time limit of their own."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from tests.support.processes import until
from tests.support.requirements import is_required, require_backend
from tests.support.worlds import with_marks
from unisono.context import current, replica
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
)
from unisono.testing.pytest_plugin.body import World

BIG = 2_000_000  # elements: more than what travels in a round
LIMIT_S = 60.0
on_mpi = [pytest.mark.ranks(2, on="mpi4py", timeout=200)] if is_required("mpi4py") else []
two = with_marks(pytest.mark.ranks(2), *on_mpi)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in a thread each, all of which are this replica; give what each returned."""
    context = current()

    def run(call: Callable[[], Any]) -> Any:
        with replica(context):
            return call()

    with ThreadPoolExecutor() as threads:
        return [*threads.map(run, calls)]


@two
@pytest.mark.parametrize("is_async", [False, True])
def test_groups_of_the_same_ranks_may_be_called_in_another_order_by_each_rank(
    world: World, is_async: bool
) -> None:
    """Large tensors too, whose calls are compared over the control plane before they travel."""
    groups = [unisono.new_group([0, 1]) for _ in range(2)]
    first = threading.Event()

    def total(at: int, value: float) -> Any:
        if at != world.rank:  # each rank begins with another group
            first.wait()
        first.set()
        values: Any = (torch.full((BIG,), value), value)
        got: Any = [unisono.all_reduce(x, group=groups[at], async_op=is_async) for x in values]
        big, found = [each.wait() for each in got] if is_async else got
        return found, big[0].item(), big[-1].item()

    found = in_threads(lambda: total(0, 1.0), lambda: total(1, 100.0))
    assert found == [(2.0, 2.0, 2.0), (200.0, 200.0, 200.0)]


everywhere = with_marks(pytest.mark.ranks(2, on=("threads", "gloo", "unisono")), *on_mpi)


@everywhere
@pytest.mark.parametrize("size", [1, BIG])
def test_a_call_under_way_over_one_group_holds_up_no_other(world: World, size: int) -> None:
    one, other = (unisono.new_group([0, 1]) for _ in range(2))
    if world.rank == 0:
        handle = unisono.all_reduce(torch.ones(size), group=one, async_op=True)
        unisono.barrier(group=other)
        total = handle.wait()
    else:
        unisono.barrier(group=other)
        total = unisono.all_reduce(torch.ones(size), group=one)
    assert total[-1] == 2


@everywhere
def test_groups_that_no_rank_has_leave_nothing(world: World) -> None:
    """Neither ours nor torch's own, which its maker destroys: descriptors, threads, counts."""
    context = current()
    is_torchs = context.model.name == "native-dist"

    def use() -> None:
        theirs = [dist.new_group([0, 1])] if is_torchs else []
        for group in (unisono.new_group([0, 1]), *theirs):
            assert unisono.all_reduce(torch.ones(BIG), group=group)[-1] == 2
            assert unisono.all_reduce(1, group=group, async_op=True).wait() == 2
        for group in theirs:
            dist.destroy_process_group(group)

    def held() -> tuple[int, ...]:
        gc.collect()
        counts = [len(kept) for kept in (context.calls._numbers, context.control.steps.counts)]
        what = ("fd", "task") if is_torchs and torch.__version__ >= "2.7" else ()
        return (*counts, *(len(os.listdir(f"/proc/self/{each}")) for each in what))

    use()
    before = held()
    for _ in range(4):
        use()
    until(lambda: held() <= before, LIMIT_S)


@pytest.mark.ranks(2, on="gloo")
def test_a_group_whose_handle_somebody_has_stays() -> None:
    handle: Any = unisono.new_group([0, 1]).handle
    unisono.new_group([0, 1])
    dist.all_reduce(total := torch.ones(1), group=handle)
    assert total == 2


@pytest.mark.ranks(2, on="gloo")
def test_ranks_that_make_different_groups_are_told(world: World) -> None:
    with pytest.raises(CollectiveMismatchError, match=rf"rank {world.rank}.* new_group \[0"):
        unisono.new_group([0, world.rank] if world.rank else [0])


@with_marks(pytest.mark.ranks(1, on=("serial", "gloo", "threads")), *on_mpi)
def test_a_bad_timeout_of_a_group_is_refused() -> None:
    wrong: Any
    for wrong in (0, -1, "2"):
        with pytest.raises(ArgumentError, match="timeout"):
            unisono.new_group([0], timeout=wrong)
    with pytest.raises(ArgumentError, match="tiemout"):
        unisono.new_group([0], tiemout=3)  # type: ignore[call-arg]


# Which leave no context behind that could be used again


def seconds_in_vain(rank: int, size: int, group: unisono.Group, given_up: Path) -> float:
    """Let rank 1 not come before rank 0 has given up; give how long that has waited."""
    if rank == 1:
        until(given_up.exists, LIMIT_S)
        return 0.0
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeoutError):
        unisono.all_reduce(torch.ones(size), group=group)
    given_up.touch()
    return time.monotonic() - begin


@pytest.mark.parametrize("size", [1, BIG])
@pytest.mark.parametrize("backend", ["gloo", "threads", "mpi4py"])
def test_the_timeout_of_a_group_is_heeded(backend: str, size: int, tmp_path: Path) -> None:
    require_backend(backend)

    def fn(rank: int) -> float:
        group = unisono.new_group([0, 1], timeout=0.5)
        unisono.barrier(group=group)
        return seconds_in_vain(rank, size, group, tmp_path / "given up")

    seconds, _ = unisono.spawn(backend, fn, nproc_per_node=2, timeout=LIMIT_S)
    assert 0.4 < seconds < 5


@pytest.mark.parametrize("backend", ["gloo", "threads", "mpi4py"])
def test_a_group_may_have_more_time_than_the_job_and_less_than_its_block(
    backend: str, tmp_path: Path
) -> None:
    require_backend(backend)
    may_come = tmp_path / "may come"

    def fn(rank: int) -> Any:
        group = unisono.new_group([0, 1], timeout=30)
        unisono.barrier(group=group)
        if rank == 1:
            until(may_come.exists, LIMIT_S)
        else:
            threading.Timer(1.5, may_come.touch).start()  # more than what the job allows
        total = unisono.all_reduce(1, group=group)
        with unisono.deadline(0.3):
            return total, seconds_in_vain(rank, 1, group, tmp_path / "given up")

    (first, seconds), (second, _) = unisono.spawn(backend, fn, nproc_per_node=2, timeout=1)
    assert (first, second) == (2, 2)
    assert seconds < 5
