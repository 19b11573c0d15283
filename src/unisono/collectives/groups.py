"""Creation of groups of ranks, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch.distributed as dist
from typing_extensions import Unpack

from unisono.arguments import seconds
from unisono.collectives.call import collective, exchange_blobs, guarded
from unisono.collectives.membership import GroupLike, checked, make, resolve
from unisono.collectives.outcomes import exchange
from unisono.context import communicator, current_model
from unisono.control.rendezvous import host_of_this_process
from unisono.options import GroupOptions
from unisono.topology import Group


@guarded
def new_group(ranks: Sequence[int], **options: Unpack[GroupOptions]) -> Group:
    """Create a group of ranks.

    Collective at creation. All ranks of the context call it, whether members of the group or not,
    and all create their groups in the same order.

    Args:
        ranks: global ranks, in any order; the group is ordered by rank. An empty sequence, such as
            ``range(1, 1)``, creates an empty group: a collective over it returns each rank's own
            input unchanged.
        options: ``timeout``, in seconds or as a timedelta, for each collective over the group (by
            default the job's timeout; XLA has none), and options of the model's library: for
            torch.distributed ``backend``, ``pg_options`` and ``group_desc``.

    Returns:
        A group for the `group` argument of collectives. It has its own communicator, even if
        another group has the same ranks. A list of ranks passed as `group` creates a group at its
        first use, and later uses get the same group.

    Raises:
        ArgumentError: a rank is listed twice, isn't in the job or isn't an int; or the timeout is
            invalid, or the model doesn't have an option.
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
    with context.calls.begin("new_group"):
        return make(context, checked(context, ranks), **given)


@guarded
def local_group() -> Group:
    """Return the group of the ranks on this node.

    Collective at creation: the first call in a context is collective over all its ranks; later
    calls are local.

    Returns:
        The same group on every call.

    Raises:
        UnsupportedOperation: the model has no groups.

    Example:
        >>> import unisono as idist
        >>> idist.local_group().size
        1
    """
    context = communicator()
    own_group = context.groups.get(())  # a key that no list of ranks has
    if own_group is None:
        node = (host_of_this_process(), context.model.topology.node_rank)
        with context.calls.begin("local_group"):
            nodes = exchange(context, "local_group", node)
        for other in dict.fromkeys(nodes):  # all ranks create the groups of all nodes, in order
            ranks = [rank for rank, place in enumerate(nodes) if place == other]
            made = resolve(context, ranks)  # not None for a list
            if other == node and made is not None:
                own_group = context.groups[()] = made
        assert own_group is not None  # `nodes` has this rank's node
    return own_group


@overload
def barrier(group: GroupLike = None) -> None: ...


@overload
def barrier(group: GroupLike = None, *, async_op: bool = False) -> Any: ...


@collective()
def barrier(group: GroupLike = None, *, async_op: bool = False) -> Any:
    """Wait until every rank has reached the barrier.

    Collective over `group`.

    Args:
        group: a Group, a list of ranks, or None for all ranks.
        async_op: whether to return a handle at once.

    Returns:
        None, or a handle.

    Raises:
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.barrier()
    """
    context, members = group
    # `and None`: the list of blobs is never empty, so the result is None.
    return lambda: exchange_blobs(context, "barrier", b"", members) and None


def library_group(group: Group) -> Any:
    """Return torch's process group if torch.distributed connects the ranks, else `group`."""
    outsider = dist.GroupMember.NON_GROUP_MEMBER
    if current_model().adopt_group(outsider) is None:  # the ranks aren't connected by torch
        return group
    # Torch gives a rank no handle of a group that it isn't a member of.
    return outsider if group.handle is None else group.handle
