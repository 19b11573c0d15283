"""Groups of ranks: made, cached, checked; and the barrier."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

from typing_extensions import Unpack

from unisono.arguments import seconds
from unisono.collectives.call import collective, swap
from unisono.context import ContextState, communicator, own_context
from unisono.errors import ArgumentError, GroupMembershipError
from unisono.model.handle import Handle
from unisono.options import GroupOptions
from unisono.payload.codec import decode, encode
from unisono.topology import Group
from unisono.tracebacks import hides

__all__ = (
    "GroupLike",
    "barrier",
    "check_rank",
    "local_group",
    "new_group",
    "outcome",
    "resolve",
    "team",
)

__tracebackhide__ = hides

T = TypeVar("T")
GroupLike = Any
"""What `group=` takes: a Group, a list of global ranks, or a group of the model's own library."""


@collective
def new_group(ranks: Sequence[int], **options: Unpack[GroupOptions]) -> Group:
    """Make a group of ranks.

    Collective at creation, over all ranks of the context, members or not, in the same order.

    Args:
        ranks: global ranks, in any order; the group is ordered by rank. None of them, as of
            ``range(1, 1)``, makes a group whose collectives give every rank its input back.
        options: ``timeout``, in seconds or as a timedelta, for each collective over the group (by
            default the job's; XLA takes none), and what the model's library takes: on native
            ``backend``, ``pg_options``, ``group_desc``.

    Returns:
        A group for the `group` argument of collectives. It is a communicator of its own, also
        where others have the same ranks. A list of ranks given there instead makes one group at its
        first use, and no other later.

    Raises:
        ArgumentError: a rank twice, one that isn't in the job, or one that isn't an int; a
            bad timeout, or an option that the model doesn't take.
        UnsupportedOperation: the model has no groups.

    Example:
        >>> import unisono as idist
        >>> idist.new_group([0]).ranks
        (0,)
    """
    context = communicator()
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if "timeout" in given:
        given["timeout"] = seconds("timeout", given["timeout"])
    return _make(context, _checked(context, ranks), **given)


def _make(context: ContextState, ranks: tuple[int, ...], **options: Any) -> Group:
    """Make a group; one of nobody needs no communicator."""
    if not ranks:
        return Group((), context_id=context.context_id)
    return context.model.new_group(ranks, **options).of_context(context.context_id)


def _checked(context: ContextState, ranks: Sequence[int]) -> tuple[int, ...]:
    size = context.model.topology.world_size
    if not isinstance(ranks, (list, tuple, range)):
        raise ArgumentError(f"ranks should be a list of global ranks: {ranks!r}")
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
    """Turn what the user gave as `group` into a group of the model, None for all ranks.

    Collective at creation, if it is a list of ranks that this context hasn't seen.

    Raises:
        GroupMembershipError: the group belongs to another context, or to one that has ended.
        ArgumentError: it is neither a group nor a list of ranks.
    """
    if group is None:
        return None
    if type(group) is Group:
        if group.context_id != context.context_id:
            raise GroupMembershipError(
                f"group {group.ranks} belongs to another context than the active "
                f"{context.model.name} one, probably to a finished job: make it again with "
                "new_group"
            )
        return group
    if isinstance(group, (list, tuple, range)):
        ranks = tuple(group)
        found = context.groups.get(ranks) if ranks else _make(context, ())
        # True and 1.0 are equal to 1 as keys, and no ranks.
        if found is None or any(type(rank) is not int for rank in ranks):
            ordered = _checked(context, ranks)
            found = context.groups.get(ordered) or _make(context, ordered)
            context.groups[ordered] = context.groups[ranks] = found
        return found
    adopted = context.model.adopt_group(group)
    if adopted is None:
        raise ArgumentError(
            "group should be a Group, a list of global ranks or a group of "
            f"{context.model.name}: {group!r}"
        )
    return adopted.of_context(context.context_id)


def team(group: GroupLike, async_op: bool = False) -> tuple[ContextState, Group | None, bool]:
    """Give the active model, the group, and whether this replica is a member of it.

    Collective at creation, as `resolve` is.
    """
    context = own_context() if async_op else communicator()
    if group is None:
        return context, None, True
    if async_op:
        context = communicator()
    found = resolve(context, group)
    return context, found, found is None or context.model.topology.rank in found.ranks


def check_rank(context: ContextState, group: Group | None, rank: int, role: str) -> None:
    """Refuse a root that isn't there, on every rank alike. Local."""
    size = context.model.topology.world_size
    if type(rank) is not int or not 0 <= rank < size:
        raise ArgumentError(f"{role}={rank!r} should be a global rank from 0 to {size - 1}")
    if group is not None and rank not in group.ranks:
        raise GroupMembershipError(f"{role}={rank} isn't a member of the group {group.ranks}")


def outcome(context: ContextState, call: Callable[[], T], async_op: bool) -> T | Handle[T]:
    """Run a collective, or start it. Collective over the ranks that `call` is."""
    return context.start(call) if async_op else call()


@collective
def local_group() -> Group:
    """Give the group of the ranks on this node.

    Collective at creation, over all ranks of the context, at the first call in a context; later
    calls are local.

    Returns:
        The same group at every call.

    Raises:
        UnsupportedOperation: the model has no groups.

    Example:
        >>> import unisono as idist
        >>> idist.local_group().size
        1
    """
    context = communicator()
    found = context.groups.get(())
    if found is None:
        node = (socket.gethostname(), context.model.topology.node_rank)
        frames = swap(context, "local_group", encode(node), None)
        nodes = [decode(frame, context.model.device) for frame in frames]
        for other in dict.fromkeys(nodes):
            ranks = [rank for rank, place in enumerate(nodes) if place == other]
            made = resolve(context, ranks)
            if other == node and made is not None:
                found = context.groups[()] = made
        assert found is not None
    return found


@overload
def barrier(group: GroupLike = None, *, async_op: Literal[False] = False) -> None: ...


@overload
def barrier(group: GroupLike = None, *, async_op: Literal[True]) -> Handle[None]: ...


@overload
def barrier(group: GroupLike = None, *, async_op: bool) -> Handle[None] | None: ...


@collective
def barrier(group: GroupLike = None, *, async_op: bool = False) -> Any:
    """Wait until every rank has come.

    Collective over `group`.

    Args:
        group: a Group, a list of ranks, or None for all ranks.
        async_op: whether to return a handle at once.

    Returns:
        None, or a handle.

    Raises:
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> idist.barrier()
    """
    context, found, is_member = team(group, async_op)
    if not is_member:
        return Handle(lambda: None, lambda: True) if async_op else None
    return outcome(context, lambda: _meet(context, found), async_op)


def _meet(context: ContextState, group: Group | None) -> None:
    swap(context, "barrier", b"", group)
