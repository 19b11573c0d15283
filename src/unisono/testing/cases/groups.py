"""Groups: membership, roots, caching, and calls by ranks that are not members."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

import unisono as idist
from unisono.context import ContextState, communicator, current, replica
from unisono.errors import ArgumentError, GroupMembershipError
from unisono.testing.cases._law import law, needs_ranks, raises, same, tensor_of, worlds
from unisono.topology import Group


@law("groups")
def a_group_is_ordered_by_rank_and_knows_its_members() -> None:
    _, size = worlds()
    group = idist.new_group(list(reversed(range(size))))
    same(group.ranks, tuple(range(size)))
    same(group.size, size)
    assert 0 in group and size not in group


@law("groups")
def collectives_of_a_group_concern_its_members_alone() -> None:
    rank, size = worlds()
    members = list(range(0, size, 2))
    group = idist.new_group(members)
    is_member = rank in members
    value = tensor_of(rank, (4,), torch.float32)
    parts = [tensor_of(r, (4,), torch.float32) for r in members]
    for spelling in (group, members, tuple(members)):
        same(idist.all_reduce(value, group=spelling), sum(parts) if is_member else value)
        same(idist.all_reduce(rank, group=spelling), sum(members) if is_member else rank)
        same(idist.all_gather(rank, group=spelling), members if is_member else rank)
        same(idist.all_gather(value, group=spelling), torch.cat(parts) if is_member else value)
        same(
            idist.broadcast(f"r{rank}", src=members[-1], group=spelling),
            f"r{members[-1]}" if is_member else f"r{rank}",
        )
        idist.barrier(group=spelling)
    last = members[-1]
    expected = torch.cat(parts) if rank == last else None if is_member else value
    same(idist.gather(value, dst=last, group=group), expected)
    total = idist.reduce(rank, dst=last, group=group)
    same(total, sum(members) if rank == last else None if is_member else rank)
    texts = [f"to {r}" for r in members]
    got = idist.scatter(texts, src=last, group=group)
    same(got, f"to {rank}" if is_member else texts)
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


@law("groups")
def groups_that_overlap_do_not_mix() -> None:
    rank, size = worlds()
    if not needs_ranks(2):
        return
    low, high = list(range(size - 1)), list(range(1, size))
    for _ in range(5):
        a = idist.all_gather(rank, group=low)
        b = idist.all_gather(rank, group=high)
        same(a, low if rank in low else rank)
        same(b, high if rank in high else rank)
    same(idist.all_reduce(1), size)


@law("groups")
def a_list_of_ranks_makes_one_group_however_often_it_is_used() -> None:
    _, size = worlds()
    members = list(range(size))
    idist.all_reduce(1, group=members)
    before = len(current().groups)
    for _ in range(20):
        idist.all_reduce(1, group=list(members))
        idist.all_reduce(1, group=tuple(members))
    same(len(current().groups), before)


@law("groups")
def two_groups_of_the_same_ranks_are_two_communicators() -> None:
    """Rank 0 calls both at once, each in a separate thread; the others one after the other.

    On a model that records graphs, which have one order, every rank calls one after the other.
    """
    rank, size = worlds()
    context = communicator()
    if not needs_ranks(2):
        return
    one, other = idist.new_group(range(size)), idist.new_group(range(size))
    for _ in range(10):
        results: dict[str, Any] = {}
        if rank == 0 and not context.control.is_lazy:
            thread = threading.Thread(target=_sum_in_a_thread, args=(context, one, results))
            thread.start()
            results["other"] = idist.all_reduce(100, group=other)
            thread.join()
        else:
            results["other"] = idist.all_reduce(100, group=other)
            results["one"] = idist.all_reduce(1, group=one)
        same((results["one"], results["other"]), (size, 100 * size), "sums of the two groups")


def _sum_in_a_thread(context: ContextState, group: Group, results: dict[str, Any]) -> None:
    with replica(context):
        try:
            results["one"] = idist.all_reduce(1, group=group)
        except Exception as error:
            results["one"] = error


@law("groups")
def bad_groups_are_refused_on_every_rank() -> None:
    _, size = worlds()
    lists: list[Any] = [[0, 0], [size], [-1], [True], ["0"], [0.0], [[0]]]
    for wrong in lists:
        raises(ArgumentError, partial(idist.new_group, wrong), ["ranks"])
        raises(ArgumentError, partial(idist.all_reduce, 1, group=wrong), ["ranks"])
    raises(ArgumentError, partial(idist.all_reduce, 1, group="all"), ["group"])
    same(idist.all_reduce(1), size)


@law("groups")
def a_group_of_nobody_gives_every_rank_its_input() -> None:
    rank, size = worlds()
    groups: list[Any] = [idist.new_group([]), idist.new_group(range(size, size)), [], ()]
    for nobody in groups:
        same(idist.all_reduce(rank + 1, group=nobody), rank + 1)
        same(idist.all_gather("mine", group=nobody), "mine")
        idist.barrier(group=nobody)
    same(idist.all_reduce(1), size)
    assert idist.local_group().size > 0


@law("groups")
def a_group_equals_the_list_of_its_ranks() -> None:
    _, size = worlds()
    group = idist.new_group(list(range(size)))
    assert group == list(range(size))
    assert group != [*range(size), size]
    assert group != idist.new_group(list(range(size))), "two groups are two communicators"


@law("groups")
def a_root_outside_of_the_group_is_refused_on_every_rank() -> None:
    rank, size = worlds()
    if not needs_ranks(2):
        return
    group = idist.new_group([0])
    parts = ["isn't a member"]
    raises(GroupMembershipError, partial(idist.broadcast, 1, src=size - 1, group=group), parts)
    raises(GroupMembershipError, partial(idist.gather, 1, dst=size - 1, group=group), parts)
    raises(GroupMembershipError, partial(idist.reduce, 1, dst=size - 1, group=group), parts)
    raises(GroupMembershipError, partial(idist.scatter, [1], src=size - 1, group=group), parts)
    same(idist.all_gather(rank), list(range(size)))


@law("groups")
def a_group_of_nobody_leaves_every_value_as_it_is() -> None:
    """Such a group results from `range(1, world_size)` in a program with one rank."""
    rank, _ = worlds()
    nobody: tuple[Any, ...] = (idist.new_group([]), [])
    for group in nobody:
        same(idist.all_reduce(rank, group=group), rank)
        same(idist.all_gather("x", group=group), "x")
        idist.barrier(group=group)


@law("groups")
def the_local_group_has_the_ranks_of_this_node() -> None:
    rank, _ = worlds()
    group = idist.local_group()
    assert rank in group
    same(group.size, idist.get_nproc_per_node())
    assert idist.local_group() is group
    same(idist.all_gather(rank, group=group), list(group.ranks))


@law()
def a_group_of_another_context_is_refused() -> None:
    stranger = idist.Group((0,), context_id=-1)
    raises(GroupMembershipError, partial(idist.all_reduce, 1, group=stranger), ["another context"])
