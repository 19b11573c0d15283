"""CPU tensors between hosts of several ranks: memory inside, the model between, as one operation.

The hosts are pretended: ranks that don't share one by their names meet over TCP, and share nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from tests.support.by_hand import Check, by_hand, join, outcomes
from tests.support.shared_memory import assert_collectives_are_right
from unisono.context import communicator
from unisono.control import rendezvous
from unisono.errors import CollectiveError, CollectiveMismatchError, PayloadError, PeerFailedError
from unisono.host import memory
from unisono.host.hierarchical import TwoLevels
from unisono.model.reduction import ReduceOp
from unisono.topology import Group

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

MIB = 1 << 20
COUNT = 300_001  # 1.2 MB of float32, not a multiple of anything
LONG = 9 * MIB // 8 + 1  # of float32 goes in slices


def pretend(hosts: str, rank: int) -> None:
    os.environ["UNISONO_SOCKET_IFNAME"] = "lo"
    vars(rendezvous)["host_of_this_process"] = lambda: f"host {hosts[rank]}"
    if hosts[rank].isupper():
        os.environ["UNISONO_SHARED_BYTES"] = "0"


@contextmanager
def noted() -> Iterator[list[str]]:
    """Take note of each operation in the block that goes through both levels."""
    calls: list[str] = []
    control: Any = communicator().control
    assert isinstance(control.memory(None), TwoLevels)
    begin = control.begin

    def note(group: Group | None, call: str) -> Any:
        calls.append(call)
        return begin(group, call)

    vars(control)["begin"] = note
    yield calls
    del vars(control)["begin"]


def every_collective_of_large_tensors(rank: int, size: int, folder: Path) -> None:
    with noted() as calls:
        assert_collectives_are_right([COUNT, LONG], torch.float32)
    assert calls.count("all_reduce SUM") == 6
    assert unisono.all_gather(calls) == [calls] * size


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint64),
)


CUT = (torch.bfloat16, torch.float32, torch.int64)  # of these also some that goes in slices


def means_something(dtype: torch.dtype, op: ReduceOp) -> bool:
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if op is ReduceOp.AVERAGE:
        return is_inexact
    is_ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
    return not (is_inexact if op.is_bitwise else dtype.is_complex and is_ordered)


def all_ranks_get_the_same_bits(rank: int, size: int, folder: Path) -> None:
    compared = 0
    for dtype in DTYPES:
        with noted() as calls:
            for count in (70_000, LONG * 4 // dtype.itemsize)[: 1 + (dtype in CUT)]:
                torch.manual_seed(rank)
                kind = torch.complex128 if dtype.is_complex else torch.float64
                mine = (100 * torch.rand(count, dtype=kind)).to(dtype)
                for op in ReduceOp:
                    if means_something(dtype, op):
                        name: Any = op.name
                        total = unisono.all_reduce(mine, name)
                        bits = total.contiguous().view(torch.uint8)
                        assert torch.equal(unisono.broadcast(bits, src=0), bits), (dtype, op)
                        compared += 1
        assert calls, dtype
    assert compared > 70
    exact = torch.randint(-(2**62), 2**62, (LONG,))
    everybody = unisono.all_gather(exact).view(size, -1)
    assert torch.equal(unisono.all_reduce(exact), everybody.sum(0))  # which wraps alike


def gradients_and_parameters_are_averaged(rank: int, size: int, folder: Path) -> None:
    with noted() as calls:
        shapes = [(3,), (1000, 500), (7, 7), (2 * MIB,)]
        values = [torch.full(shape, float(rank)) for shape in shapes]
        unisono.all_reduce_params(values)
        assert all(value.eq(1.5).all() for value in values)
        with torch.inference_mode():
            apart = torch.full((COUNT,), float(rank))
            assert unisono.all_reduce(apart)[-1] == 6
        assert unisono.all_reduce_(apart)[-1] == 6
    assert calls.count("all_reduce AVERAGE") == 2  # the large one, and the others
    net = nn.Linear(1, 1)
    model: Any = unisono.auto_model(net)
    with model.join(divide_by_initial_world_size=False):
        for step in range(1 + (rank == 0)):
            model.zero_grad()
            model(torch.tensor([[rank + 1.0]])).sum().backward()
            assert net.weight.grad == [2.5, 1.0][step]


def groups_over_several_hosts_stay_with_the_model(rank: int, size: int, folder: Path) -> None:
    pair, three = unisono.new_group([0, 1]), unisono.new_group([0, 1, 3])
    if rank in pair.ranks:
        assert unisono.all_reduce(torch.ones(COUNT), group=pair)[-1] == 2
        assert communicator().control.host(pair) is not None
    if rank in three.ranks:
        assert unisono.all_reduce(torch.ones(COUNT), group=three)[-1] == 3
        assert communicator().control.memory(three) is None
    assert unisono.all_reduce(torch.ones(COUNT))[-1] == 4


def calls_that_differ_are_named(rank: int, size: int, folder: Path) -> None:
    with pytest.raises(CollectiveMismatchError) as differs:
        unisono.all_reduce(torch.ones(COUNT + (rank == 3)))
    assert "rank 3" in str(differs.value)
    assert "float32[300002]" in str(differs.value)
    tensor = torch.ones(COUNT)
    with pytest.raises(PayloadError if rank == 3 else CollectiveMismatchError, match="sparse"):
        unisono.all_reduce(tensor.to_sparse() if rank == 3 else tensor)
    assert unisono.all_reduce(torch.ones(COUNT))[-1] == 4  # nothing is broken by it


def one_host_without_memory_leaves_all_to_the_model(rank: int, size: int, folder: Path) -> None:
    assert unisono.all_reduce(torch.ones(COUNT))[-1] == 4
    assert communicator().control.memory(None) is None


CHECKS: dict[str, list[Check]] = {
    "aabb": [
        all_ranks_get_the_same_bits,
        gradients_and_parameters_are_averaged,
        groups_over_several_hosts_stay_with_the_model,
        calls_that_differ_are_named,
    ],
    "abab": [every_collective_of_large_tensors],
    "aab": [every_collective_of_large_tensors],
    "aaBB": [one_host_without_memory_leaves_all_to_the_model],
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What failed, by the hosts of the ranks of a job."""
    found = {}
    for hosts, checks in CHECKS.items():
        set_up, folder = partial(pretend, hosts), tmp_path_factory.mktemp(hosts)
        found[hosts] = outcomes(checks, len(hosts), folder, "gloo", set_up=set_up)
    return found


@pytest.mark.parametrize(
    ("hosts", "name"),
    [(hosts, check.__name__) for hosts, checks in CHECKS.items() for check in checks],
)
def test_hosts_meet_on_two_levels(jobs: dict[str, dict[str, str]], hosts: str, name: str) -> None:
    assert not jobs[hosts][name], jobs[hosts][name]


@pytest.mark.parametrize(
    ("dead", "count"), [(2, 15 * LONG), (3, COUNT)], ids=["leader, slices", "other, whole"]
)
def test_a_death_on_the_other_host_is_named(dead: int, count: int, tmp_path: Path) -> None:
    """In the midst of sums."""

    def fn(rank: int) -> None:
        pretend("aabb", rank)
        join(tmp_path, rank, 4)
        tensor = torch.ones(count)
        unisono.all_reduce_(tensor)
        if rank == dead:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(PeerFailedError) as caught, unisono.deadline(20):
            while True:
                unisono.all_reduce_(tensor)
        with pytest.raises(CollectiveError):  # and so it stays
            unisono.all_reduce_(tensor)
        assert caught.value.rank == dead

    by_hand(fn, 4, killed=dead)
