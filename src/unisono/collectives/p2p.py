"""Messages between two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as emulation
from unisono.collectives.broadcasts import device_for, memory_for
from unisono.collectives.call import encode_or_header, guarded
from unisono.collectives.membership import GroupLike, check_rank, context_and_group
from unisono.context import ContextState
from unisono.errors import ArgumentError, GroupMembershipError
from unisono.model.fallback import FRAME_BYTES, as_frame, inline_part, length_of
from unisono.payload.codec import decode, frame_or_reason, raise_failures
from unisono.payload.tensors import TensorHeader, from_bytes, to_bytes
from unisono.topology import Group, pair


@guarded
def send(value: Any, dst: int, group: GroupLike = None) -> None:
    """Send a value to one rank, which calls `recv`.

    Collective over this rank and `dst`.

    Args:
        value: anything that `all_gather` takes.
        dst: global rank that receives it.
        group: a Group or a list of ranks that both are members of, or None.

    Raises:
        ArgumentError: `dst` is not a rank of this job, or is this rank.
        GroupMembershipError: this rank or `dst` isn't a member of the group.
        PayloadError: the value can't be sent; `dst` raises the error as well.
        UnsupportedOperation: the model has no messages between two ranks.
        CollectiveError: the peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.send("x", dst=0)
        Traceback (most recent call last):
        ...
        unisono.errors.ArgumentError: dst=0 is this rank itself
    """
    context, members = _pair(group, dst, "dst")
    with context.calls.begin("send", pair(context.model.topology.rank, dst), value):
        frame = frame_or_reason(encode_or_header, context, value, members)
        # The peer doesn't know the length of the frame, so a head of fixed size precedes it.
        head = as_frame(frame)
        context.model.send(_as_row(context, head), dst, members)
        if inline_part(head) is None:  # the frame is too long for the head
            context.model.send(_as_row(context, frame), dst, members)
        # Raise only after sending: the peer waits for the frame, then raises the same error.
        raise_failures([frame], lambda: [context.model.topology.rank], "send")
        if frame[:1] == b"h":  # the tensor follows its header
            tensor = emulation.private_copy(context, value)
            movable, _ = emulation.as_movable(context.model, tensor)
            context.model.send(movable, dst, members)


@guarded
def recv(src: int, group: GroupLike = None) -> Any:
    """Receive the value that one rank sends.

    Collective over this rank and `src`.

    Args:
        src: global rank that calls `send`.
        group: a Group or a list of ranks that both are members of, or None.

    Returns:
        The value, exact in type and content. A tensor on the sender's accelerator arrives on this
        rank's `device`.

    Raises:
        ArgumentError: `src` is not a rank of this job, or is this rank.
        GroupMembershipError: this rank or `src` isn't a member of the group.
        PayloadError: the sender's value couldn't be sent.
        UnsupportedOperation: the model has no messages between two ranks.
        CollectiveError: the peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.recv(src=0)
        Traceback (most recent call last):
        ...
        unisono.errors.ArgumentError: src=0 is this rank itself
    """
    context, members = _pair(group, src, "src")
    with context.calls.begin("recv", pair(src, context.model.topology.rank)):
        row = _as_row(context, bytes(FRAME_BYTES))
        head = to_bytes(context.model.recv(row, src, members).cpu())
        frame = inline_part(head)
        if frame is None:  # it follows the head, which has only its length
            row = _as_row(context, bytes(length_of(head)))
            frame = to_bytes(context.model.recv(row, src, members).cpu())
        raise_failures([frame], lambda: [src], "recv")
        value = decode(frame, context.model.device)
        if not isinstance(value, TensorHeader):
            return value
        movable, restore = emulation.as_movable(context.model, memory_for(context, value))
        got = restore(context.model.recv(movable, src, members))
        return value.finish(got.to(device_for(context, value)))


def _pair(group: GroupLike, peer: int, role: str) -> tuple[ContextState, Group | None]:
    """Return the context and the group of a message; raise if this rank can't have the peer."""
    context, members, is_member = context_and_group(group)
    check_rank(context, members, peer, role)
    if not is_member:
        raise GroupMembershipError(
            f"rank {context.model.topology.rank} isn't a member of {group!r}"
        )
    if peer == context.model.topology.rank:
        raise ArgumentError(f"{role}={peer} is this rank itself")
    return context, members


def _as_row(context: ContextState, data: bytes) -> Tensor:
    return from_bytes(data, torch.uint8, (len(data),)).to(context.model.transport_device)
