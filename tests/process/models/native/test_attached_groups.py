"""Groups and forks of a context that the user made by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import unisono
from tests.support.by_hand import TIMEOUT, Check, join, leave, outcomes, prepare
from tests.support.processes import in_fork
from unisono.errors import ContextError, GroupMembershipError


def a_list_of_ranks_makes_one_group(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size)
    x = torch.ones(1)
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(500):
        unisono.all_reduce(x, group=[0, 1])
        total = unisono.all_reduce(x, group=(1, 0))
    made = len(dist.distributed_c10d._world.pg_map) - before
    assert (made, total.item()) == ((1, 2) if rank < 2 else (0, 1))
    leave()


def groups_do_not_outlive_their_context(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size, "first")
    old = unisono.new_group([0, 1])
    theirs = dist.new_group([0, 1, 2])
    unisono.all_reduce(1, group=[0, 1])
    leave()
    join(folder, rank, size, "second")
    for group in (old, theirs):
        with pytest.raises(GroupMembershipError, match="make it again with new_group"):
            unisono.all_reduce(1, group=group)
    assert unisono.all_reduce(1, group=[0, 1]) == (2 if rank < 2 else 1)
    leave()
    with pytest.raises(GroupMembershipError, match="finished job"):
        unisono.all_reduce(1, group=old)


def a_group_of_torch_can_be_the_group(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size)
    pair = dist.new_group([2, 0])
    assert unisono.all_gather(rank, dist.group.WORLD) == [0, 1, 2]
    if rank != 1:
        assert unisono.all_gather(rank, group=pair) == [0, 2]
        assert unisono.broadcast(rank, src=2, group=pair) == 2
    leave()


def what_torch_gives_to_no_member_can_be_it(rank: int, size: int, folder: Path) -> None:
    join(folder, rank, size)
    wanted = [1] if rank == 1 else rank
    assert unisono.all_gather(rank, group=dist.new_group([1])) == wanted
    leave()


def initialized(rank: int, size: int, folder: Path, **options: Any) -> None:
    store = FileStore(str(folder / "ours"), size)
    unisono.initialize("gloo", rank=rank, world_size=size, store=store, **options)


def a_new_group_inherits_the_timeout_of_the_job(rank: int, size: int, folder: Path) -> None:
    def seconds() -> Any:
        handle: Any = unisono.new_group([0, 1, 2]).handle
        return handle._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    join(folder, rank, size)
    assert seconds() == TIMEOUT.total_seconds()
    leave()
    initialized(rank, size, folder, timeout=17)
    assert seconds() == 17
    unisono.finalize()


def a_fork_knows_the_facts_and_no_collective(rank: int, size: int, folder: Path) -> None:
    def look() -> None:
        assert (unisono.get_rank(), unisono.get_world_size()) == (rank, size)
        assert unisono.is_distributed()
        for call in (unisono.barrier, partial(unisono.all_reduce, torch.ones(1))):
            with pytest.raises(ContextError, match=f"fork of rank {rank}"):
                call()

    join(folder, rank, size)
    unisono.get_rank()
    assert in_fork(look) == 0
    assert unisono.all_reduce(1) == size
    leave()
    initialized(rank, size, folder)
    assert in_fork(look) == 0
    assert unisono.all_reduce(1) == size
    unisono.finalize()


CHECKS: list[Check] = [
    a_list_of_ranks_makes_one_group,
    groups_do_not_outlive_their_context,
    a_group_of_torch_can_be_the_group,
    what_torch_gives_to_no_member_can_be_it,
    a_new_group_inherits_the_timeout_of_the_job,
    a_fork_knows_the_facts_and_no_collective,
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    prepare()
    return outcomes(CHECKS, 3, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_groups_of_a_context_made_by_hand(job: dict[str, str], name: str) -> None:
    assert not job[name], job[name]
