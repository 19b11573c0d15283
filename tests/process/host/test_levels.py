"""CPU tensors between hosts of several ranks: memory inside, the model between, as one operation.

The hosts are pretended: ranks that don't share one by their names meet over TCP, and share nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.by_hand import by_hand, join, leave, prepare
from tests.support.shared_memory import assert_rows_arrive
from unisono.context import communicator
from unisono.control import rendezvous
from unisono.errors import CollectiveError, CollectiveMismatchError, PayloadError, PeerFailedError
from unisono.host import memory
from unisono.host.levels import TwoLevels
from unisono.model.reduction import ReduceOp

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

MIB = 1 << 20
COUNT = 300_001  # 1.2 MB of float32, not a multiple of anything
LONG = 9 * MIB // 8 + 1  # of float32 goes in slices
HOSTS = {
    "2 and 2": "aabb",
    "in turns": "abab",
    "2 and 1": "aab",
}


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


def meet(folder: Path, rank: int, hosts: str) -> None:
    os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    name = hosts[rank]
    vars(rendezvous)["host_of_this_process"] = lambda: f"host {name}"
    join(folder, rank, len(hosts))


def levels() -> TwoLevels:
    made = communicator().control.memory(None)
    assert isinstance(made, TwoLevels)
    return made


def noted(made: TwoLevels) -> list[str]:
    """Take note of each operation from here on that goes through both levels."""
    calls: list[str] = []
    begin = made.watch.begin

    def note(call: str) -> Any:
        calls.append(call)
        return begin(call)

    vars(made.watch)["begin"] = note
    return calls


@pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)
def test_every_collective_of_large_tensors(hosts: str, tmp_path: Path) -> None:
    world_size = len(hosts)

    def fn(rank: int) -> list[str]:
        meet(tmp_path, rank, hosts)
        calls, last = noted(levels()), world_size - 1
        for count in (COUNT, LONG):
            mine = torch.arange(count, dtype=torch.float32) + rank
            numbers = torch.arange(count, dtype=torch.float32)
            every = [numbers + other for other in range(world_size)]
            total = torch.stack(every).sum(0)
            assert torch.equal(unisono.all_reduce(mine), total)
            assert torch.equal(mine, every[rank])
            assert torch.equal(unisono.all_reduce(mine, async_op=True).wait(), total)
            assert torch.equal(unisono.all_reduce_(mine.clone()), total)
            torch.testing.assert_close(unisono.all_reduce(mine, "mean"), total / world_size)
            assert torch.equal(unisono.all_reduce(mine, "max"), every[last])
            for src in (0, last):
                given = mine if rank == src else None
                assert torch.equal(unisono.broadcast(given, src=src), every[src])
                assert torch.equal(unisono.broadcast_(mine.clone(), src=src), every[src])
        reduced = unisono.reduce(mine, dst=last)
        assert (reduced is None) == (rank != last)
        assert reduced is None or torch.equal(reduced, total)
        assert torch.equal(unisono.all_gather(mine), torch.cat(every))
        assert_rows_arrive(mine, every)
        objects = unisono.all_gather({"rank": rank, "values": mine.numpy()})
        assert all((objects[r]["values"] == x.numpy()).all() for r, x in enumerate(every))
        leave()
        return calls

    found = by_hand(fn, world_size)
    assert found == found[:1] * world_size
    assert found[0].count("all_reduce SUM") == 6


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64),
)


CUT = (torch.bfloat16, torch.float32, torch.int64)  # of these also some that goes in slices


def means_something(dtype: torch.dtype, op: ReduceOp) -> bool:
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if op.is_bitwise:
        return not is_inexact
    if op is ReduceOp.AVERAGE:
        return is_inexact
    return not (dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX))


def test_all_ranks_get_the_same_bits_for_every_dtype_and_operation(tmp_path: Path) -> None:
    def fn(rank: int) -> int:
        meet(tmp_path, rank, "aabb")
        compared = 0
        for dtype in DTYPES:
            calls = noted(levels())
            for count in (30_000, LONG * 4 // dtype.itemsize)[: 1 + (dtype in CUT)]:
                torch.manual_seed(rank)
                if dtype.is_floating_point or dtype.is_complex:
                    mine = torch.randn(count, dtype=dtype)
                else:
                    mine = torch.randint(0, 100, (count,)).to(dtype)
                for op in ReduceOp:
                    if means_something(dtype, op):
                        name: Any = op.name
                        total = unisono.all_reduce(mine, name)
                        bits = total.contiguous().view(torch.uint8)
                        assert torch.equal(unisono.broadcast(bits, src=0), bits), (dtype, op)
                        compared += 1
            assert calls, dtype
        exact = torch.randint(-(2**62), 2**62, (LONG,))
        everybody = unisono.all_gather(exact).view(4, -1)
        assert torch.equal(unisono.all_reduce(exact), everybody.sum(0))  # which wraps alike
        leave()
        return compared

    assert min(by_hand(fn, 4)) > 70


def test_gradients_and_parameters_are_averaged_through_both_levels(tmp_path: Path) -> None:
    def fn(rank: int) -> list[str]:
        meet(tmp_path, rank, "aabb")
        calls = noted(levels())
        shapes = [(3,), (1000, 500), (7, 7), (2 * MIB,)]
        values = [torch.full(shape, float(rank)) for shape in shapes]
        unisono.all_reduce_params(values)
        assert all(value.eq(1.5).all() for value in values)
        with torch.inference_mode():
            apart = torch.full((COUNT,), float(rank))
            assert unisono.all_reduce(apart)[-1] == 6
        assert unisono.all_reduce_(apart)[-1] == 6
        leave()
        return calls

    for calls in by_hand(fn, 4):
        assert calls.count("all_reduce AVERAGE") == 2  # the large one, and the others


def test_groups_over_several_hosts_stay_with_the_model(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        meet(tmp_path, rank, "aabb")
        pair, three = unisono.new_group([0, 1]), unisono.new_group([0, 1, 3])
        if rank in pair.ranks:
            assert unisono.all_reduce(torch.ones(COUNT), group=pair)[-1] == 2
            assert communicator().control.host(pair) is not None
        if rank in three.ranks:
            assert unisono.all_reduce(torch.ones(COUNT), group=three)[-1] == 3
            assert communicator().control.memory(three) is None
        assert unisono.all_reduce(torch.ones(COUNT))[-1] == 4
        leave()

    by_hand(fn, 4)


def test_where_one_host_has_no_memory_the_model_carries_everything(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        if rank == 2:  # it makes that of its host
            os.environ["UNISONO_SHARED_BYTES"] = "0"
        meet(tmp_path, rank, "aabb")
        assert unisono.all_reduce(torch.ones(COUNT))[-1] == 4
        assert communicator().control.memory(None) is None
        leave()

    by_hand(fn, 4)


def test_calls_that_differ_are_named(tmp_path: Path) -> None:
    def fn(rank: int) -> tuple[str, str]:
        meet(tmp_path, rank, "aabb")
        with pytest.raises(CollectiveMismatchError) as differs:
            unisono.all_reduce(torch.ones(COUNT + (rank == 3)))
        with pytest.raises(PayloadError if rank == 3 else CollectiveMismatchError) as refuses:
            tensor = torch.ones(COUNT)
            unisono.all_reduce(tensor.to_sparse() if rank == 3 else tensor)
        assert unisono.all_reduce(torch.ones(COUNT))[-1] == 4  # nothing is broken by it
        leave()
        return str(differs.value), str(refuses.value)

    for differs, refuses in by_hand(fn, 4):
        assert "rank 3" in differs
        assert "float32[300002]" in differs
        assert "sparse" in refuses


def dies(folder: Path, ranks: Sequence[int], how: signal.Signals, count: int) -> list[str]:
    """Let the second of `ranks` end in the midst of sums; give what each other rank was told."""

    def fn(rank: int) -> str:
        meet(folder, rank, "aabb")
        tensor = torch.ones(count)
        unisono.all_reduce_(tensor)
        if rank == ranks[0]:
            threading.Timer(0.2, os.kill, (os.getpid(), how)).start()
        with pytest.raises(CollectiveError) as caught, unisono.deadline(20):
            while True:
                unisono.all_reduce_(tensor)
        with pytest.raises(CollectiveError):  # and so it stays
            unisono.all_reduce_(tensor)
        assert isinstance(caught.value, PeerFailedError), caught.value
        return str(caught.value.rank)

    with pytest.raises(AssertionError, match=rf"rank {ranks[0]}:\nit ended without a word"):
        by_hand(lambda rank: (folder / f"{rank}").write_text(fn(rank)), 4)
    return [(folder / str(rank)).read_text() for rank in range(4) if rank != ranks[0]]


@pytest.mark.parametrize("count", [COUNT, 15 * LONG], ids=["whole", "slices"])
@pytest.mark.parametrize("rank", [2, 3], ids=["leader", "other"])
def test_a_death_on_the_other_host_is_named(rank: int, count: int, tmp_path: Path) -> None:
    assert dies(tmp_path, [rank], signal.SIGKILL, count) == [str(rank)] * 3
