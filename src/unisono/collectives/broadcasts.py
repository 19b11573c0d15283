"""Collectives that send values from one rank to others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pickle import PickleBuffer
from typing import Any, overload

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as emulation
from unisono.collectives.call import (
    T,
    TensorT,
    collective,
    compare_calls,
    encode_or_header,
    exchange_blobs,
)
from unisono.collectives.membership import GroupLike
from unisono.collectives.routing import fits_exchange, plane_for
from unisono.context import ContextState
from unisono.errors import PayloadError
from unisono.host.collectives import HostCollectives
from unisono.payload.codec import decode, decode_all, encode, frame_or_reason, header
from unisono.payload.tensors import TensorHeader, from_bytes, is_exact, plain, to_bytes
from unisono.topology import Group


@overload
def broadcast(
    tensor: None = None, src: int = 0, group: GroupLike = None, safe_mode: bool = False
) -> Any: ...


@overload
def broadcast(tensor: T, src: int = 0, group: GroupLike = None, safe_mode: bool = False) -> T: ...


@overload
def broadcast(
    tensor: Any = None,
    src: int = 0,
    group: GroupLike = None,
    safe_mode: bool = False,
    *,
    async_op: bool = False,
) -> Any: ...


@collective(root="src")
def broadcast(
    tensor: Any = None,
    src: int = 0,
    group: GroupLike = None,
    safe_mode: bool = False,
    *,
    async_op: bool = False,
) -> Any:
    """Return the value of one rank on every rank.

    Collective over `group`.

    Args:
        tensor: any payload (the parameter is called `tensor` as in ignite.distributed): on `src`
            anything that `all_gather` takes; ignored on the other ranks.
        src: global rank whose value is sent.
        group: a Group, a list of ranks, or None for all ranks.
        safe_mode: accepted for compatibility with idist; every broadcast is safe.
        async_op: whether to return a handle at once.

    Returns:
        The value of `src`, exact in type and content, new memory. A tensor that is on an
        accelerator at `src` arrives on each rank's `device`. `tensor` itself if this rank isn't a
        member.

    Raises:
        ArgumentError: `src` is not a rank of this job.
        GroupMembershipError: `src` isn't a member of the group (on every rank).
        PayloadError: the value can't be sent (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.broadcast({"seed": 2**60}, src=0)
        {'seed': 1152921504606846976}
    """
    context, members = group
    return partial(_broadcast, context, tensor, src, members)


def _broadcast(context: ContextState, value: Any, src: int, group: Group | None) -> Any:
    """Exchange a value or its header, then broadcast the tensor. Collective over `group`."""
    is_src = context.model.topology.rank == src
    # If the data plane will carry the tensor, only its header is sent here; else the whole value.
    frame = frame_or_reason(encode_or_header, context, value, group) if is_src else b""
    head = _received(context, "broadcast", src, frame, group)
    if not isinstance(head, TensorHeader):
        return head
    # `src` returns new memory as well, so it copies.
    tensor = emulation.private_copy(context, value) if is_src else memory_for(context, head)
    plane = plane_for(context, group)
    movable, restore = emulation.as_movable(plane, tensor)
    got = restore(plane.broadcast(movable, src, group))
    return head.finish(got.to(value.device if is_src else device_for(context, head)))


def _received(context: ContextState, call: str, src: int, frame: bytes, group: Group | None) -> Any:
    """Return the value that `src` encoded; the other ranks send nothing."""
    # Collective over `group`.
    frames = exchange_blobs(context, f"{call} from {src}", frame, group)
    frame = frames[context.model.topology.position(group, src)]
    return decode_all([frame], lambda: [src], call, context.model.device)[0]


def memory_for(context: ContextState, head: TensorHeader) -> Tensor:
    """Create memory for a tensor of a received header, on the model's transport device."""
    return torch.empty(head.shape, dtype=head.dtype, device=context.model.transport_device)


def device_for(context: ContextState, head: TensorHeader) -> torch.device:
    """Return the device on which a received tensor is returned to the user."""
    return context.model.device if head.on_accelerator else torch.device("cpu")


@overload
def broadcast_(tensor: TensorT, src: int = 0, group: GroupLike = None) -> TensorT: ...


@overload
def broadcast_(
    tensor: Tensor, src: int = 0, group: GroupLike = None, *, async_op: bool = False
) -> Any: ...


@collective(root="src")
def broadcast_(
    tensor: Tensor, src: int = 0, group: GroupLike = None, *, async_op: bool = False
) -> Any:
    """Overwrite a tensor on every rank with that of one rank.

    Collective over `group`.

    Args:
        tensor: [*shape], any dense dtype and device, the same shape and dtype on every rank.
        src: global rank whose tensor is sent.
        group: a Group, a list of ranks, or None for all ranks.
        async_op: whether to return a handle at once.

    Returns:
        `tensor` itself, or a handle of it.

    Raises:
        ArgumentError: `src` is not a rank of this job.
        GroupMembershipError: `src` isn't a member of the group (on every rank).
        PayloadError: `tensor` isn't a dense tensor.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.broadcast_(torch.zeros(1))
        tensor([0.])
    """
    context, members = group
    if not isinstance(tensor, Tensor):
        raise PayloadError(f"broadcast_ takes a tensor, not a {type(tensor).__name__}")
    emulation.check_writable(tensor, "broadcast_")  # on src too, so that all ranks raise alike

    def call() -> Tensor:
        compare_calls(context, f"broadcast_ from {src}", tensor, members)
        plane = plane_for(context, members)
        is_plain = tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
        # Shared memory of one host writes into the tensor that it gets, if the values lie there as
        # they are, without a pending negation or conjugation. The type is exact, as in `plane_for`:
        # another plane, or a subclass, may return new memory.
        is_direct = type(plane) is HostCollectives and tensor.is_cpu and is_plain
        values = plain(tensor) if is_direct else emulation.private_copy(context, tensor)
        movable, restore = emulation.as_movable(plane, values)
        got = restore(plane.broadcast(movable, src, members))
        if not is_direct and context.model.topology.rank != src:
            emulation.overwrite(tensor, got)
        return tensor

    return call


@overload
def scatter(values: Tensor, src: int = 0, group: GroupLike = None) -> Tensor: ...


@overload
def scatter(values: list[T] | tuple[T, ...], src: int = 0, group: GroupLike = None) -> T: ...


@overload
def scatter(
    values: Sequence[Any] | Tensor | None = None,
    src: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> Any: ...


@collective(root="src")
def scatter(
    values: Sequence[Any] | Tensor | None = None,
    src: int = 0,
    group: GroupLike = None,
    *,
    async_op: bool = False,
) -> Any:
    """Send each rank one of the values that rank `src` has.

    Collective over `group`.

    Args:
        values: on `src` a list or tuple with one value for each member, in the order of ranks, of
            anything that `all_gather` takes; or a tensor [n, ...], which counts as its n rows.
            Ignored on the other ranks.
        src: global rank that has the values.
        group: a Group, a list of ranks, or None for all ranks.
        async_op: whether to return a handle at once.

    Returns:
        This rank's value, new memory. `values` itself if this rank isn't a member.

    Raises:
        ArgumentError: `src` is not a rank of this job.
        GroupMembershipError: `src` isn't a member of the group (on every rank).
        PayloadError: not one value for each member, or one that can't be sent (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.scatter(["mine"], src=0)
        'mine'
    """
    context, members = group
    return partial(_scatter, context, values, src, members)


def _scatter(context: ContextState, values: Any, src: int, group: Group | None) -> Any:
    """Exchange the values or a header, then scatter the rows. Collective over `group`."""
    is_src = context.model.topology.rank == src
    frame = frame_or_reason(_scatter_frame, context, values, group) if is_src else b""
    head = _received(context, "scatter", src, frame, group)
    if not isinstance(head, TensorHeader):
        value = head[context.model.topology.position(group)]
        # A tuple holds encoded tensors, of which this rank decodes only its own.
        return decode(value, context.model.device) if type(head) is tuple else value
    memory = memory_for(context, head)
    plane = plane_for(context, group)
    into, restore = emulation.as_movable(plane, memory)
    rows = None
    if is_src:
        stacked = values if isinstance(values, Tensor) else torch.stack(list(values))
        kept = emulation.view_or_copy(context, plain(stacked), plane)
        rows, _ = emulation.as_movable(plane, kept)
    got = restore(plane.scatter(rows, into, src, group))
    value = got.to(device_for(context, head))
    return head.finish(value if got is memory else value.clone())  # `got` may be a view of all rows


def _scatter_frame(context: ContextState, values: Any, group: Group | None) -> bytes:
    """Encode a value for each rank, or one header if the data plane carries them as rows."""
    size = context.model.topology.size(group)
    if isinstance(values, Tensor):
        emulation.check_dense(values, "scatter")
        if values.dim() == 0 or values.shape[0] != size:
            shape = list(values.shape)
            raise PayloadError(f"a tensor of shape {shape} has no row for each of {size} ranks")
        values = list(plain(values))
    if not isinstance(values, (list, tuple)) or len(values) != size:
        count = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
        raise PayloadError(f"scatter takes a list of {size} values, one for each rank, not {count}")
    if not all(map(is_exact, values)):
        return encode(list(values))
    # One header for all tensors if they are of one kind and too large for the exchange.
    heads = {b"" if fits_exchange(context, value, group) else header(value) for value in values}
    if len(heads) == 1 and b"" not in heads:
        return heads.pop()
    return encode(tuple(PickleBuffer(encode(value)) for value in values))


@overload
def all_to_all(value: Tensor, group: GroupLike = None) -> Tensor: ...


@overload
def all_to_all(value: list[T] | tuple[T, ...], group: GroupLike = None) -> list[T]: ...


@overload
def all_to_all(
    value: Tensor | Sequence[Any], group: GroupLike = None, *, async_op: bool = False
) -> Any: ...


@collective()
def all_to_all(value: Any, group: GroupLike = None, *, async_op: bool = False) -> Any:
    """Send a part to every rank and receive a part from each.

    Collective over `group`.

    Args:
        value: tensor [n*k, ...] with n the number of members, the same shape on every rank; or a
            list of n values of anything that `all_gather` takes, of any shapes.
        group: a Group, a list of ranks, or None for all ranks.
        async_op: whether to return a handle at once.

    Returns:
        For a tensor, a new one [n*k, ...] of the same dtype and device, whose i-th part is from the
        i-th member; for a list, the values that the members sent to this rank, in rank order.
        `value` itself if this rank isn't a member.

    Raises:
        PayloadError: dim 0 of a tensor isn't a multiple of n; or a list doesn't have n values, or
            one of them can't be sent (on every rank).
        CollectiveMismatchError: another rank rejected its tensor, if calls are compared.
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.all_to_all(torch.tensor([5]))
        tensor([5])
        >>> idist.all_to_all(["to myself"])
        ['to myself']
    """
    context, members = group
    size = context.model.topology.size(members)
    if not isinstance(value, Tensor):
        return partial(_exchange_values, context, value, members)
    emulation.check_dense(value, "all_to_all")
    if value.dim() == 0 or value.shape[0] % size:
        raise PayloadError(
            f"all_to_all takes a tensor whose dim 0 is a multiple of {size}, not one of shape "
            f"{list(value.shape)}"
        )

    def call() -> Tensor:
        compare_calls(context, "all_to_all", value, members)
        plane = plane_for(context, members)
        tensor = emulation.view_or_copy(context, plain(value), plane)
        rows = tensor.view(size, value.shape[0] // size, *value.shape[1:])
        movable, restore = emulation.as_movable(plane, rows)
        return restore(plane.all_to_all(movable, members)).reshape(value.shape).to(value.device)

    return call


def _exchange_values(context: ContextState, values: Any, group: Group | None) -> list[Any]:
    """Exchange lengths, then padded frames, one for each rank. Collective over `group`."""
    size, ranks = context.model.topology.size(group), context.model.topology.members(group)
    frames: list[bytes] = []  # filled by `lengths`, since `frame_or_reason` returns bytes

    def lengths() -> bytes:
        if not isinstance(values, (list, tuple)) or len(values) != size:
            raise PayloadError(f"all_to_all takes a tensor or a list of {size} values: {values!r}")
        frames[:] = [encode(item) for item in values]
        return encode([len(frame) for frame in frames])

    own_lengths = frame_or_reason(lengths)
    # All frames are padded to the longest one of any rank, whose length this exchange shows.
    lengths_of_all = exchange_blobs(context, "all_to_all of values", own_lengths, group)
    sizes = decode_all(lengths_of_all, lambda: ranks, "all_to_all", context.model.device)
    # Rounded up for XLA, which compiles once per size.
    width = context.control.bucket(max(max(row) for row in sizes))
    padded = b"".join(frame.ljust(width, b"\0") for frame in frames)
    rows = from_bytes(padded, torch.uint8, (size, width)).to(context.model.transport_device)
    got = plane_for(context, group).all_to_all(rows, group).cpu().contiguous()
    place = context.model.topology.position(group)
    return [
        decode(to_bytes(row[: sizes[i][place]]), context.model.device) for i, row in enumerate(got)
    ]
