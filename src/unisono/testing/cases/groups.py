"""Groups: membership, roots, caching, and calls by ranks that are not members."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import unisono as idist
from unisono.context import communicator, current, replica
from unisono.errors import ArgumentError, GroupMembershipError
from unisono.testing.cases._law import law, raises, same, tensor_of


@law("groups")
def a_group_is_the_ordered_list_of_its_ranks(rank: int, size: int) -> None:
    group = idist.new_group(list(reversed(range(size))))
    same(group.ranks, tuple(range(size)))
    same(group.size, size)
    assert 0 in group and size not in group
    assert group == list(range(size))
    assert group != [*range(size), size]
    assert group != idist.new_group(list(range(size))), "two groups are two communicators"


@law("groups")
def collectives_of_a_group_concern_its_members_alone(rank: int, size: int) -> None:
    members = list(range(0, size, 2))
    group, last = idist.new_group(members), members[-1]
    is_member = rank in members
    value = tensor_of(rank, (4,), torch.float32)
    parts = [tensor_of(r, (4,), torch.float32) for r in members]
    for spelling in (group, members, tuple(members)):
        same(idist.all_reduce(value, group=spelling), sum(parts) if is_member else value)
        same(idist.all_reduce(rank, group=spelling), sum(members) if is_member else rank)
        same(idist.all_gather(rank, group=spelling), members if is_member else rank)
        same(idist.all_gather(value, group=spelling), torch.cat(parts) if is_member else value)
        sent = idist.broadcast(f"r{rank}", src=last, group=spelling)
        same(sent, f"r{last if is_member else rank}")
        idist.barrier(group=spelling)
    # Members other than the root get None; other ranks get their own value.
    expected = torch.cat(parts) if rank == last else None if is_member else value
    same(idist.gather(value, dst=last, group=group), expected)
    total = idist.reduce(rank, dst=last, group=group)
    same(total, sum(members) if rank == last else None if is_member else rank)
    texts = [f"to {r}" for r in members]
    same(idist.scatter(texts, src=last, group=group), f"to {rank}" if is_member else texts)
    swapped = idist.all_to_all([f"{rank}-{r}" for r in members], group=group)
    same(swapped, [f"{r}-{rank}" if is_member else f"{rank}-{r}" for r in members])
    rows = torch.arange(float(2 * len(members)))
    position = members.index(rank) if is_member else 0
    part = rows[2 * position : 2 * position + 2] * len(members)
    same(idist.reduce_scatter(rows, group=group), part if is_member else rows)
    mine = value.clone()
    idist.all_reduce_(mine, group=group)
    same(mine, sum(parts) if is_member else value)
    handle = idist.all_reduce(rank, group=group, async_op=True)
    same(handle.wait(), sum(members) if is_member else rank)


@law("groups", ranks=2)
def groups_that_overlap_do_not_mix(rank: int, size: int) -> None:
    low, high = list(range(size - 1)), list(range(1, size))
    for _ in range(5):
        for group in (low, high):
            same(idist.all_gather(rank, group=group), group if rank in group else rank)


@law("groups")
def a_list_of_ranks_makes_one_group_however_often_it_is_used(rank: int, size: int) -> None:
    members = list(range(size))
    idist.all_reduce(1, group=members)
    before = len(current().groups)
    for _ in range(20):
        idist.all_reduce(1, group=list(members))
        idist.all_reduce(1, group=tuple(members))
    same(len(current().groups), before)


@law("groups", ranks=2)
def two_groups_of_the_same_ranks_are_two_communicators(rank: int, size: int) -> None:
    """Rank 0 uses both groups at once, in two threads; other ranks use one after the other.

    On a model that records graphs, whose calls have one order, rank 0 does as the other ranks.
    """
    context = communicator()
    one, other = idist.new_group(range(size)), idist.new_group(range(size))

    def sum_in_one() -> Any:
        with replica(context):
            return idist.all_reduce(1, group=one)

    with ThreadPoolExecutor(1) as thread:
        for _ in range(10):
            if rank == 0 and not context.control.is_lazy:
                begun = thread.submit(sum_in_one)
                second = idist.all_reduce(100, group=other)
                first = begun.result()
            else:
                second = idist.all_reduce(100, group=other)
                first = idist.all_reduce(1, group=one)
            same((first, second), (size, 100 * size), "sums of the two groups")


@law("groups")
def bad_groups_are_refused_on_every_rank(rank: int, size: int) -> None:
    for wrong in ([0, 0], [size], [-1], [True], ["0"], [0.0], [[0]]):
        raises(ArgumentError, ["ranks"], idist.new_group, wrong)
        raises(ArgumentError, ["ranks"], idist.all_reduce, 1, group=wrong)
    raises(ArgumentError, ["group"], idist.all_reduce, 1, group="all")


@law("groups")
def a_group_of_nobody_gives_every_rank_its_input(rank: int, size: int) -> None:
    """Such a group results from `range(1, world_size)` in a program with one rank."""
    nobody: Any
    for nobody in (idist.new_group([]), idist.new_group(range(size, size)), [], ()):
        same(idist.all_reduce(rank, group=nobody), rank)
        same(idist.all_gather("mine", group=nobody), "mine")
        idist.barrier(group=nobody)
    same(idist.all_reduce(1), size)
    assert idist.local_group().size > 0


@law("groups", ranks=2)
def a_root_outside_of_the_group_is_refused_on_every_rank(rank: int, size: int) -> None:
    group, root, parts = idist.new_group([0]), size - 1, ["isn't a member"]
    raises(GroupMembershipError, parts, idist.broadcast, 1, src=root, group=group)
    raises(GroupMembershipError, parts, idist.gather, 1, dst=root, group=group)
    raises(GroupMembershipError, parts, idist.reduce, 1, dst=root, group=group)
    raises(GroupMembershipError, parts, idist.scatter, [1], src=root, group=group)


@law("groups")
def the_local_group_has_the_ranks_of_this_node(rank: int, size: int) -> None:
    group = idist.local_group()
    assert rank in group
    same(group.size, idist.get_nproc_per_node())
    assert idist.local_group() is group
    same(idist.all_gather(rank, group=group), list(group.ranks))


@law()
def a_group_of_another_context_is_refused(rank: int, size: int) -> None:
    stranger = idist.Group((0,), context_id=-1)
    raises(GroupMembershipError, ["another context"], idist.all_reduce, 1, group=stranger)
