"""Tensors in memory that ranks share: here the ranks are threads of one process."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.errors import CollectiveError, ContextError
from unisono.host import arena, memory
from unisono.host.arena import Arena, Layout
from unisono.host.collectives import DTYPES, HostCollectives
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.payload.tensors import as_bytes_tensor
from unisono.testing.cases._law import same
from unisono.topology import Group

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

KIB = 1 << 10
SMALL = Layout(2, 16 * KIB, 4 * KIB, True)  # a few thousand elements are several blocks
COUNTS = (1, 7, 1000, 4096, 4097, 20_001)
LIMIT_S = 60


class Stuck(Exception):
    """Raised by a look of a rank that waited too long."""


class Watching:
    """Looks in one way at every operation, and keeps what was left half-way."""

    def __init__(self, look: Callable[[int], None]) -> None:
        self.look, self.left = look, list[str]()

    def begin(self, group: Group | None, call: str) -> Callable[[int], None]:
        return self.look

    def interrupt(self, how: str) -> None:
        self.left.append(how)


def together(fn: Callable[[int, HostCollectives], Any], plan: Layout = SMALL) -> list[Any]:
    """Run ``fn(rank, collectives)`` in a thread for each rank."""
    shared = mmap.mmap(-1, plan.size_bytes)
    ranks = [10 * rank for rank in range(plan.size)]
    end = threading.Event()
    timer = threading.Timer(LIMIT_S, end.set)
    timer.start()

    def look(position: int) -> None:
        if end.is_set():
            raise Stuck

    def run(rank: int) -> Any:
        return fn(rank, HostCollectives(Arena(shared, rank, plan), ranks, Watching(look)))

    try:
        with ThreadPoolExecutor(plan.size) as pool:
            return list(pool.map(run, range(plan.size)))
    finally:
        timer.cancel()


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return (10 * torch.randn(count, generator=generator)).to(dtype)


def is_defined(op: ReduceOp, dtype: torch.dtype) -> bool:
    if op.is_bitwise:
        return not (dtype.is_floating_point or dtype.is_complex)
    return not (dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX))


def folded(op: ReduceOp, parts: list[Tensor]) -> Tensor:
    """Reduce in the order of ranks."""
    return reduce(lambda total, part: fold_tensors(op, torch.stack([total, part])), parts)


EVERYTHING = [
    (op, dtype)
    for op, dtype in product(ReduceOp, sorted(DTYPES, key=str))
    if op is not ReduceOp.AVERAGE and is_defined(op, dtype)
]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reductions_are_those_in_rank_order_to_the_bit(size: int) -> None:
    cases = []
    for (op, dtype), count in product(EVERYTHING, COUNTS):
        parts = [values(rank, count, dtype) for rank in range(size)]
        cases.append((op, parts, folded(op, parts)))

    def fn(rank: int, host: HostCollectives) -> None:
        for op, parts, expected in cases:
            mine, into = parts[rank].clone(), torch.empty_like(expected)
            assert host.all_reduce(mine, op, into=into) is into
            total = host.reduce(mine.clone(), 10 * (size - 1), op)
            assert torch.equal(as_bytes_tensor(mine), as_bytes_tensor(parts[rank]))
            assert host.all_reduce(mine, op) is mine
            torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(into, expected, rtol=0, atol=0, equal_nan=True)
            assert (total is None) == (rank != size - 1)
            if total is not None:
                torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)

    together(fn, replace(SMALL, size=size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_mean_overflows_nowhere(size: int) -> None:
    def fn(rank: int, host: HostCollectives) -> None:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for count in COUNTS:
                largest = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
                assert host.all_reduce(largest, ReduceOp.AVERAGE).isfinite().all()
                mine = torch.full((count,), float(rank), dtype=dtype)
                host.all_reduce(mine, ReduceOp.AVERAGE)
                torch.testing.assert_close(mine, torch.full_like(mine, (size - 1) / 2))

    together(fn, replace(SMALL, size=size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_short_tensors_are_reduced_in_one_go(size: int) -> None:
    def fn(rank: int, host: HostCollectives) -> None:
        mine = [torch.full((count,), float(rank)) for count in (1, 5, 300, 0, 17)]
        host.all_reduce_packed(mine, ReduceOp.SUM)
        for each in mine:
            assert torch.equal(each, torch.full_like(each, sum(range(size))))

    together(fn, replace(SMALL, size=size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_movements_of_every_dtype(size: int) -> None:
    dtypes = (*sorted(DTYPES, key=str), torch.bool, torch.uint16, torch.float8_e4m3fn)

    cases = [
        [values(rank, size * count, dtype).view(size, count) for rank in range(size)]
        for dtype, count in product(dtypes, COUNTS)
    ]

    def fn(rank: int, host: HostCollectives) -> None:
        for parts in cases:
            same(host.all_gather(parts[rank]), torch.stack(parts))
            same(host.broadcast(parts[rank].clone(), 10), parts[1])
            same(host.all_to_all(parts[rank]), torch.stack([part[rank] for part in parts]))
            rows = parts[1] if rank == 1 else None
            same(host.scatter(rows, torch.empty_like(parts[0][0]), 10), parts[1][rank])
            if parts[0].dtype in DTYPES:
                expected = folded(ReduceOp.SUM, [part[rank] for part in parts])
                same(host.reduce_scatter(parts[rank], ReduceOp.SUM), expected)

    together(fn, replace(SMALL, size=size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_reduction_in_two_halves_is_that_in_one(size: int) -> None:
    def fn(rank: int, host: HostCollectives) -> None:
        for count in COUNTS:
            parts = [values(other, count, torch.float32) for other in range(size)]
            mine, expected = parts[rank].clone(), folded(ReduceOp.SUM, parts)
            width = -(-count // size)
            same(host.reduce_slice(mine, ReduceOp.SUM), expected[rank * width :][:width])
            host.gather_slices(mine)
            same(mine, expected)

    together(fn, replace(SMALL, size=size))


def test_bytes_of_different_lengths() -> None:
    blobs = [b"", b"x" * 100_000, b"yz"]

    def fn(rank: int, host: HostCollectives) -> list[bytes]:
        return [bytes(blob) for blob in host.exchange(blobs[rank], [len(b) for b in blobs])]

    assert together(fn, replace(SMALL, size=3)) == [blobs] * 3


def test_what_follows_an_operation_that_was_left_is_refused() -> None:
    """Its barriers would be others than those of the ranks that it left."""

    class LeftError(Exception):
        pass

    late: list[int] = []

    def look(position: int) -> None:
        late.append(position)
        raise LeftError

    watch = Watching(look)
    host = HostCollectives(Arena(mmap.mmap(-1, SMALL.size_bytes), 0, SMALL), [0, 1], watch)
    with pytest.raises(LeftError):
        host.all_reduce(torch.ones(3), ReduceOp.SUM)  # the other rank never comes
    assert late == [1]
    assert watch.left == ["LeftError interrupted all_reduce SUM"]
    with pytest.raises(CollectiveError, match="all_gather: an earlier call failed"):
        host.all_gather(torch.ones(3))


def test_after_the_end_of_the_context_nothing_can_be_called() -> None:
    shared = mmap.mmap(-1, SMALL.size_bytes)
    host = HostCollectives(Arena(shared, 0, SMALL), [0, 1], Watching(lambda position: None))
    host.close()
    shared.close()  # which fails where somebody still sees it
    with pytest.raises(
        ContextError, match="broadcast from 0: the context that used this shared memory has ended"
    ):
        host.broadcast(torch.ones(3), 0)


@pytest.mark.parametrize("is_first", [False, True])
def test_inference_mode_leaves_no_trace(is_first: bool) -> None:
    """Later calls write to the same memory, and tensors of either mode are reduced in either."""

    def fn(rank: int, host: HostCollectives) -> None:
        for count in (3, 20_001):
            with torch.inference_mode(is_first):
                assert host.all_reduce(torch.ones(count), ReduceOp.SUM)[-1] == 2
                host.all_gather(torch.ones(count))
            with torch.inference_mode():
                apart = torch.ones(count)
            for tensor in (apart, torch.ones(count)):
                with torch.inference_mode(not is_first):
                    assert host.all_reduce(tensor, ReduceOp.SUM)[-1] == 2
                    host.all_reduce_packed([tensor[:3]], ReduceOp.SUM)
                    assert host.broadcast(tensor, 10)[0] == 4
            assert host.all_reduce(apart, ReduceOp.SUM)[0] == 8

    together(fn)


def test_threads_of_one_group_take_turns() -> None:
    def fn(rank: int, host: HostCollectives) -> None:
        def sums(_: int) -> list[float]:
            return [float(host.all_reduce(torch.ones(5000), ReduceOp.SUM)[-1]) for _ in range(50)]

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(sums, range(3))) == [[2.0] * 50] * 3

    together(fn)


def test_the_layout_leaves_room_for_others() -> None:
    def body_bytes(size: int, cores: int, *, is_crowded: bool, **most: int) -> int:
        plan = arena.layout(size, cores=cores, **most)
        assert plan is not None
        assert plan.is_crowded is is_crowded
        return plan.size_bytes - plan.head_bytes

    assert body_bytes(2, 8, is_crowded=False) == 8 << 20
    assert body_bytes(4, 2, is_crowded=True) // 4 <= 8 << 20
    assert body_bytes(2, 8, is_crowded=False, max_bytes=2 << 20) <= 2 << 20
    assert arena.layout(2, cores=8, max_bytes=1 << 17) is None


@pytest.mark.parametrize("size", [2, 5])
def test_an_arena_is_read_as_it_was_made_and_no_other_memory(size: int) -> None:
    made = arena.make(size, cores=2, max_bytes=1 << 40)
    assert made is not None
    fd, first = made
    with open(fd, "rb+") as file:
        shared = mmap.mmap(file.fileno(), 0)
    last = arena.read(shared, size, size - 1)
    assert last.layout == first.layout
    with pytest.raises(OSError, match="isn't laid out for these ranks"):
        arena.read(shared, size + 1, 0)
    with pytest.raises(OSError, match="too small"):
        arena.read(mmap.mmap(-1, 64), 2, 1)
    with pytest.raises(OSError, match="isn't laid out"):
        arena.read(mmap.mmap(-1, 1 << 20), 2, 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads can't be moved here")
def test_the_last_of_the_ranks_on_one_core_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    core, moves = min(allowed), list[set[int]]()
    free = max(allowed) + 1
    shared = mmap.mmap(-1, SMALL.size_bytes)
    ends = [Arena(shared, rank, replace(SMALL, is_crowded=False)) for rank in range(SMALL.size)]
    os.sched_setaffinity(0, {core})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda pid: {core, free})
            patch.setattr(os, "sched_setaffinity", lambda pid, cores: moves.append(cores))
            for end in (ends[0], ends[1], ends[0]):
                for _ in range(arena._TURNS):
                    end.give_way()
            assert moves == [{free}, {core, free}]  # rank 1 alone, which may use all cores again
            patch.setattr(os, "sched_getaffinity", lambda pid: {core})
            for _ in range(arena._TURNS):
                ends[1].give_way()
            assert len(moves) == 2  # no core is better
    finally:
        os.sched_setaffinity(0, allowed)
