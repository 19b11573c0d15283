"""Groups and forks of a context that the user made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import TIMEOUT, by_hand, join, leave, prepare
from tests.support.processes import in_fork
from unisono.errors import ContextError, GroupMembershipError


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    prepare()
    yield


def test_a_list_of_ranks_makes_one_group_however_often_it_is_used(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3)
        x = torch.ones(1)
        before = len(dist.distributed_c10d._world.pg_map)
        for _ in range(500):
            unisono.all_reduce(x, group=[0, 1])
            total = unisono.all_reduce(x, group=(1, 0))
        after = len(dist.distributed_c10d._world.pg_map)
        leave()
        return after - before, total.item()

    assert by_hand(fn, 3) == [(1, 2), (1, 2), (0, 1)]


def test_groups_do_not_outlive_their_context(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3, "first")
        old = unisono.new_group([0, 1])
        theirs = dist.new_group([0, 1, 2])
        unisono.all_reduce(1, group=[0, 1])
        leave()
        join(tmp_path, rank, 3, "second")
        for group in (old, theirs):
            with pytest.raises(GroupMembershipError, match="make it again with new_group"):
                unisono.all_reduce(1, group=group)
        found = unisono.all_reduce(1, group=[0, 1])
        leave()
        with pytest.raises(GroupMembershipError, match="finished job"):
            unisono.all_reduce(1, group=old)
        return found

    assert by_hand(fn, 3) == [2, 2, 1]


def test_a_group_of_torch_can_be_the_group(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 3)
        pair = dist.new_group([2, 0])
        found = [unisono.all_gather(rank, dist.group.WORLD)]
        if rank != 1:
            found.append(unisono.all_gather(rank, group=pair))
            found.append(unisono.broadcast(rank, src=2, group=pair))
        leave()
        return found

    world = [0, 1, 2]
    assert by_hand(fn, 3) == [[world, [0, 2], 2], [world], [world, [0, 2], 2]]


def test_what_torch_gives_to_a_rank_that_is_no_member_can_be_the_group(tmp_path: Path) -> None:
    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2)
        found = unisono.all_gather(rank, group=dist.new_group([1]))
        leave()
        return found

    assert by_hand(fn) == [0, [1]]


def test_a_new_group_inherits_the_timeout_of_the_job(tmp_path: Path) -> None:
    def timeout_of(group: unisono.Group) -> Any:
        handle: Any = group.handle
        return handle._get_backend(torch.device("cpu")).options._timeout

    def fn(rank: int) -> Any:
        join(tmp_path, rank, 2, "by hand")
        found = [timeout_of(unisono.new_group([0, 1]))]
        leave()
        store = FileStore(str(tmp_path / "ours"), 2)
        unisono.initialize("gloo", rank=rank, world_size=2, store=store, timeout=17)
        found.append(timeout_of(unisono.new_group([0, 1])))
        unisono.finalize()
        return [timeout.total_seconds() for timeout in found]

    assert by_hand(fn) == [[TIMEOUT.total_seconds(), 17]] * 2


@pytest.mark.parametrize("by_whom", ["the user", "initialize"])
def test_a_fork_of_a_replica_knows_the_facts_and_is_refused_collectives(
    by_whom: str, tmp_path: Path
) -> None:
    def fn(rank: int) -> Any:
        if by_whom == "the user":
            join(tmp_path, rank, 2)
            unisono.get_rank()
        else:
            store = FileStore(str(tmp_path / "ours"), 2)
            unisono.initialize("gloo", rank=rank, world_size=2, store=store)

        def look() -> None:
            assert (unisono.get_rank(), unisono.get_world_size()) == (rank, 2)
            assert unisono.is_distributed()
            for call in (unisono.barrier, partial(unisono.all_reduce, torch.ones(1))):
                with pytest.raises(ContextError, match=f"fork of rank {rank}"):
                    call()

        code, total = in_fork(look), unisono.all_reduce(1)
        leave()
        return code, total

    assert by_hand(fn) == [(0, 2)] * 2
