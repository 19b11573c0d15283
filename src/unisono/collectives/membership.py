"""Groups and roots of collectives: resolution of `group=`, and membership checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.context import ContextState, communicator
from unisono.errors import ArgumentError, GroupMembershipError
from unisono.topology import Group

GroupLike = Any
"""Values of `group=`: a Group, a list of global ranks, or a group of the model's own library."""


def make(context: ContextState, ranks: tuple[int, ...], **options: Any) -> Group:
    """Create a group; an empty one needs no communicator. Collective at creation."""
    if not ranks:
        return Group((), context_id=context.context_id)
    context.settle()  # pending calls must end first: creation is collective over all ranks
    context.control.begin_group(ranks)
    context.forget_ended()  # `begin_group` ends the groups that were dropped
    group = context.model.new_group(ranks, **options).of_context(context.context_id)
    if context.model.topology.rank in ranks:
        context.control.watch_over(group)
    return group


def checked(context: ContextState, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of a new group in order, if all are ranks of the job."""
    size = context.model.topology.world_size
    if not isinstance(ranks, (list, tuple, range)):
        raise ArgumentError(f"ranks should be a list of global ranks: {ranks!r}")
    # `isinstance` would accept True as rank 1.
    wrong = [rank for rank in ranks if type(rank) is not int or not 0 <= rank < size]
    if wrong:
        raise ArgumentError(
            f"ranks {list(ranks)!r}: {wrong[0]!r} is not a rank of this job: use ints from 0 to "
            f"{size - 1}"
        )
    if len(set(ranks)) < len(ranks):
        raise ArgumentError(f"ranks {list(ranks)!r}: duplicate ranks")
    return tuple(sorted(ranks))


def resolve(context: ContextState, group: GroupLike) -> Group | None:
    """Convert the user's `group` to a group of the model, None for all ranks."""
    # Collective at creation, if it is a list of ranks that this context hasn't seen.
    if group is None:
        return None
    if type(group) is Group:
        if group.context_id != context.context_id:
            raise GroupMembershipError(
                f"group {group.ranks} belongs to another context than the active "
                f"{context.model.name} one, probably to a finished job: create it again with "
                "new_group"
            )
        return group
    if isinstance(group, (list, tuple, range)):
        ranks = tuple(group)
        if any(type(rank) is not int for rank in ranks):  # as keys, True and 1.0 equal 1
            checked(context, ranks)
        # Every empty list makes a new group, because the key () holds the local group.
        made = context.groups.get(ranks) if ranks else make(context, ())
        if made is None:
            ordered = checked(context, ranks)
            made = context.groups.get(ordered) or make(context, ordered)
            # Also under the order that the user gave, so that it is found without being sorted.
            context.groups[ordered] = context.groups[ranks] = made
        return made
    adopted = context.model.adopt_group(group)
    if adopted is None:
        raise ArgumentError(
            "group should be a Group, a list of global ranks or a group of "
            f"{context.model.name}: {group!r}"
        )
    context.forget_ended()  # adopting may end groups that the user destroyed
    return adopted.of_context(context.context_id)


def resolve_and_settle(
    context: ContextState, group: GroupLike, *, async_op: bool = False
) -> Group | None:
    """Resolve a group; unless the call is asynchronous, wait for pending operations over it."""
    # Collective at creation, as `resolve` is.
    resolved = resolve(context, group)
    if not async_op:
        context.settle(resolved)
    return resolved


def context_and_group(group: GroupLike) -> tuple[ContextState, Group | None, bool]:
    """Return the active context, the group, and whether this replica is a member of it."""
    # Collective at creation, as `resolve` is.
    context = communicator(settles=False)  # only operations over this group have to end
    resolved = resolve_and_settle(context, group)
    is_member = resolved is None or context.model.topology.rank in resolved.ranks
    return context, resolved, is_member


def check_rank(context: ContextState, group: Group | None, rank: int, role: str) -> None:
    """Raise on every rank if a root isn't a rank of the job, or not a member of the group."""
    size = context.model.topology.world_size
    if type(rank) is not int or not 0 <= rank < size:
        raise ArgumentError(f"{role}={rank!r} should be a global rank from 0 to {size - 1}")
    if group is not None and rank not in group.ranks:
        raise GroupMembershipError(f"{role}={rank} isn't a member of the group {group.ranks}")
