"""Collectives that gather the values of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any, overload

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as emulation
from unisono.collectives.call import T, collective, compare_calls, encode_or_header, exchange_blobs
from unisono.collectives.membership import GroupLike
from unisono.collectives.routing import plane_for
from unisono.context import ContextState
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.payload.codec import decode_all, encode, frame_or_reason
from unisono.payload.tensors import TensorHeader, head_of, plain
from unisono.topology import Group


@overload
def all_gather(  # type: ignore[overload-overlap]  # tensors are joined
    tensor: Tensor, group: GroupLike = None
) -> Tensor: ...


@overload
def all_gather(tensor: T, group: GroupLike = None) -> list[T]: ...


@overload
def all_gather(
    tensor: Any, group: GroupLike = None, *, uneven: bool = False, async_op: bool = False
) -> Any: ...


@collective()
def all_gather(
    tensor: Any, group: GroupLike = None, *, uneven: bool = False, async_op: bool = False
) -> Any:
    """Gather a value of every rank on every rank.

    Collective over `group`.

    Args:
        tensor: any payload (the parameter is called `tensor` as in ignite.distributed): a tensor
            [d0, ...] of any dense dtype and device, where d0 may differ between ranks, unlike the
            other dimensions and the dtype; or a number, bool, str, bytes, Path, None, container or
            object that can be pickled, also of different types.
        group: a Group, a list of ranks, or None for all ranks.
        uneven: whether to return tensors as a list by rank instead of one tensor; their shapes may
            then differ in every dimension.
        async_op: whether to return a handle at once; don't change `tensor` until ``wait``.

    Returns:
        For tensors [sum of d0, ...] in rank order, for 0-dim tensors [n], same dtype and device,
        new memory; else a list of the values by rank. `tensor` itself if this rank isn't a
        member.

    Raises:
        PayloadError: some rank's value can't be sent (on every rank, naming it).
        CollectiveMismatchError: tensor shapes don't match (on every rank, naming each shape).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.all_gather(torch.tensor([[1, 2]]))
        tensor([[1, 2]])
        >>> idist.all_gather("é")
        ['é']
    """
    context, members = group

    def call() -> Any:
        parts = _gather(context, tensor, members, "all_gather")
        if not isinstance(tensor, Tensor):
            return parts
        if not uneven:
            return _joined(context, tensor, parts, members)
        # Copied, as one row would keep the memory of all rows alive.
        return [part.clone() for part in parts] if isinstance(parts, Tensor) else parts

    return call


def _gather(
    context: ContextState, value: Any, group: Group | None, call: str
) -> list[Any] | Tensor:
    """Return every rank's value, from one exchange and one gather of the large tensors."""
    # Large tensors of one shape are returned as [n, *shape], which serves as a list.
    is_tensor = isinstance(value, Tensor)
    make = partial(_tensor_frame, context, call=call, group=group) if is_tensor else encode
    frames = exchange_blobs(context, call, frame_or_reason(make, value), group)
    model = context.model
    values = decode_all(frames, lambda: model.topology.members(group), call, model.device)
    if TensorHeader not in map(type, values):
        return values  # each value was short enough to arrive whole
    # From here on all ranks decide by the same headers: they raise together, or gather together.
    ranks = context.model.topology.members(group)
    if not all(isinstance(item, (TensorHeader, Tensor)) for item in values):
        kinds = _listed([_kind(item) for item in values], ranks)
        raise CollectiveMismatchError(f"{call} of tensors and of other values at once: {kinds}")
    # Short tensors have arrived whole, but are gathered again with the long ones.
    heads = [item if isinstance(item, TensorHeader) else head_of(item) for item in values]
    dtypes = {head.dtype for head in heads}
    if len(dtypes) > 1:
        raise CollectiveMismatchError(f"{call} of different dtypes: {_listed(heads, ranks)}")
    shapes = [head.shape for head in heads]
    rows = _padded_rows(context, value, shapes, group)
    if len(set(shapes)) == 1:
        return rows.reshape(len(heads), *shapes[0])
    return _without_padding(rows, shapes)


def _padded_rows(
    context: ContextState, tensor: Tensor, shapes: Sequence[tuple[int, ...]], group: Group | None
) -> Tensor:
    """Gather the elements of all ranks' tensors, each row padded to the longest."""
    longest = max(math.prod(shape) for shape in shapes)
    plane = plane_for(context, group)
    row = emulation.view_or_copy(context, plain(tensor), plane).reshape(-1)
    if row.numel() < longest:
        row = torch.cat([row, row.new_zeros(longest - row.numel())])
    return emulation.all_gather(plane, row, group).to(tensor.device)


def _without_padding(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return copies of the rows without their padding."""
    padded = zip(rows, shapes, strict=True)
    return [row[: math.prod(shape)].reshape(shape).clone() for row, shape in padded]


def _tensor_frame(context: ContextState, value: Tensor, call: str, group: Group | None) -> bytes:
    """Encode a tensor, or only its header if the data plane carries it."""
    emulation.check_dense(value, call)
    # Tensors of any class are joined to a plain one.
    return encode_or_header(context, plain(value), group)


def _kind(item: object) -> str:
    """Return a value's type for messages, or a tensor's dtype and shape."""
    if isinstance(item, Tensor):
        item = head_of(item)
    return str(item) if isinstance(item, TensorHeader) else type(item).__qualname__


def _listed(items: Sequence[object], ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}: {item}" for rank, item in zip(ranks, items, strict=True))


def _joined(
    context: ContextState, value: Tensor, parts: list[Any] | Tensor, group: Group | None
) -> Any:
    """Join the parts along dim 0 on the device of `value`; raise on all ranks if they don't fit."""
    if isinstance(parts, Tensor):
        # The parts are [n, d0, ...], or [n] already if each has 0 dimensions.
        return parts.flatten(0, 1) if parts.dim() > 1 else parts
    if not all(isinstance(part, Tensor) for part in parts):
        return parts  # ranks passed different types, all of which arrived whole
    heads = [head_of(part) for part in parts]
    if len({(head.dtype, head.shape[1:], len(head.shape)) for head in heads}) > 1:
        shapes = _listed(heads, context.model.topology.members(group))
        raise CollectiveMismatchError(
            f"all_gather can't join {shapes}: all but dim 0 must "
            "agree; pass uneven=True for a list by rank"
        )
    joined = torch.stack(parts) if value.dim() == 0 else torch.cat(parts)
    return joined.to(value.device)


@overload
def all_gather_tensors_with_shapes(
    tensor: Tensor, shapes: Sequence[Sequence[int]], group: GroupLike = None
) -> list[Tensor]: ...


@overload
def all_gather_tensors_with_shapes(
    tensor: Tensor,
    shapes: Sequence[Sequence[int]],
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> Any: ...


@collective(refuses=(ArgumentError, PayloadError), outside=lambda tensor: [tensor])
def all_gather_tensors_with_shapes(
    tensor: Tensor,
    shapes: Sequence[Sequence[int]],
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> Any:
    """Gather tensors whose shapes every rank already knows, in one round.

    Collective over `group`.

    Args:
        tensor: [*shapes[i]] where i is this rank's position in the group; one dtype on every rank.
        shapes: the shape of every member's tensor, the same list on every rank.
        group: a Group, a list of ranks, or None for all ranks.
        async_op: whether to return a handle at once.

    Returns:
        A list of tensors by rank, same dtype and device, new memory; ``[tensor]`` if this rank
        isn't a member.

    Raises:
        ArgumentError: `shapes` doesn't have one shape for each member, or this rank's shape in it
            isn't that of `tensor`.
        PayloadError: `tensor` isn't a dense tensor.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.all_gather_tensors_with_shapes(torch.ones(2), [[2]])
        [tensor([1., 1.])]
    """
    context, members = group
    name, topology = "all_gather_tensors_with_shapes", context.model.topology
    if not isinstance(tensor, Tensor):
        raise PayloadError(f"{name} takes a tensor, not a {type(tensor).__qualname__}")
    emulation.check_dense(tensor, name)
    try:  # as ints of Python, whatever the type of the sizes: ranks compare them as text
        expected = [tuple(index(size) for size in shape) for shape in shapes]
    except TypeError as error:
        raise ArgumentError(f"{name}: `shapes` should be a list of shapes: {error}") from error
    if len(expected) != topology.size(members):
        raise ArgumentError(
            f"{name}: {len(expected)} shapes were given for {topology.size(members)} ranks"
        )
    stated = expected[topology.position(members)]
    if tuple(tensor.shape) != stated:
        raise ArgumentError(
            f"{name}: rank {topology.rank} has a tensor of shape {list(tensor.shape)}, but its "
            f"shape is {list(stated)} in `shapes`"
        )

    def call() -> list[Tensor]:
        # An empty tensor for the dtype: this rank's shape may differ, and the text has all shapes.
        compare_calls(context, f"{name} {expected}", tensor.new_empty(0), members)
        return _without_padding(_padded_rows(context, tensor, expected, members), expected)

    return call


@overload
def gather(  # type: ignore[overload-overlap]  # tensors are joined
    value: Tensor, dst: int = 0, group: GroupLike = None
) -> Tensor | None: ...


@overload
def gather(value: T, dst: int = 0, group: GroupLike = None) -> list[T] | None: ...


@overload
def gather(value: Any, dst: int = 0, group: GroupLike = None, *, async_op: bool = False) -> Any: ...


@collective(root="dst")
def gather(value: Any, dst: int = 0, group: GroupLike = None, *, async_op: bool = False) -> Any:
    """Gather a value of every rank on one rank.

    Collective over `group`.

    Args:
        value: what `all_gather` takes.
        dst: global rank that receives the result.
        group: a Group, a list of ranks, or None for all ranks.
        async_op: whether to return a handle at once.

    Returns:
        As `all_gather` on `dst`, None on the other members, `value` itself on a rank that isn't a
        member.

    Raises:
        ArgumentError: `dst` is not a rank of this job.
        GroupMembershipError: `dst` isn't a member of the group (on every rank).
        PayloadError: some rank's value can't be sent (on every rank, naming it).
        CollectiveMismatchError: tensor shapes don't match (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.gather(3, dst=0)
        [3]
    """
    context, members = group

    def call() -> Any:
        parts = _gather(context, value, members, f"gather to {dst}")
        # Every rank joins the parts, so that all ranks raise if the shapes don't fit.
        whole = _joined(context, value, parts, members) if isinstance(value, Tensor) else parts
        return whole if context.model.topology.rank == dst else None

    return call
