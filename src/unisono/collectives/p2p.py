"""Messages from one rank to one other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as carriers
from unisono.collectives.broadcasts import home, memory_for
from unisono.collectives.call import collective
from unisono.collectives.groups import GroupLike, check_rank, team
from unisono.errors import ArgumentError, GroupMembershipError
from unisono.model.contract import ComputationModel
from unisono.model.fallback import FRAME_BYTES, as_frame, inline_part, length_of
from unisono.payload.codec import (
    TensorHeader,
    decode,
    frame_or_reason,
    offer,
    raise_failures,
)
from unisono.payload.memory import from_bytes, to_bytes
from unisono.topology import Group
from unisono.tracebacks import hides

__all__ = ("recv", "send")

__tracebackhide__ = hides


@collective
def send(value: Any, dst: int, group: GroupLike = None) -> None:
    """Send a value to one rank, which calls `recv`.

    Collective over this rank and `dst`.

    Args:
        value: anything that `all_gather` takes.
        dst: global rank that receives it.
        group: a Group or a list of ranks that both are members of, or None.

    Raises:
        ArgumentError: `dst` isn't there, or is this rank.
        GroupMembershipError: this rank or `dst` isn't a member of the group.
        PayloadError: the value can't be sent; `dst` gets the error as well.
        UnsupportedOperation: the model has no messages between two ranks.
        CollectiveError: the peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> idist.send("x", dst=0)
        Traceback (most recent call last):
        ...
        unisono.errors.ArgumentError: dst=0 is this rank itself
    """
    model, found = _pair(group, dst, "dst")
    frame = frame_or_reason(offer, value, model.inline_bytes(found))
    head = as_frame(frame)
    model.send(_as_row(model, head), dst, found)
    if inline_part(head) is None:
        model.send(_as_row(model, frame), dst, found)
    raise_failures([frame], [model.topology.rank], "send")
    if frame[:1] == b"h":  # the tensor follows its header
        carrier, _ = carriers.movement(model, carriers.own(model, value))
        model.send(carrier, dst, found)


@collective
def recv(src: int, group: GroupLike = None) -> Any:
    """Receive the value that one rank sends.

    Collective over this rank and `src`.

    Args:
        src: global rank that calls `send`.
        group: a Group or a list of ranks that both are members of, or None.

    Returns:
        The value, exact in type and content. A tensor that is on an accelerator there arrives on
        this rank's `device`.

    Raises:
        ArgumentError: `src` isn't there, or is this rank.
        GroupMembershipError: this rank or `src` isn't a member of the group.
        PayloadError: the sender's value couldn't travel.
        UnsupportedOperation: the model has no messages between two ranks.
        CollectiveError: the peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> idist.recv(src=0)
        Traceback (most recent call last):
        ...
        unisono.errors.ArgumentError: src=0 is this rank itself
    """
    model, found = _pair(group, src, "src")
    head = to_bytes(model.recv(_as_row(model, bytes(FRAME_BYTES)), src, found).cpu())
    frame = inline_part(head)
    if frame is None:
        room = _as_row(model, bytes(length_of(head)))
        frame = to_bytes(model.recv(room, src, found).cpu())
    raise_failures([frame], [src], "recv")
    value = decode(frame, model.device)
    if not isinstance(value, TensorHeader):
        return value
    carrier, restore = carriers.movement(model, memory_for(model, value))
    got = restore(model.recv(carrier, src, found))
    return value.finish(got.to(home(model, value)))


def _pair(group: GroupLike, peer: int, role: str) -> tuple[ComputationModel, Group | None]:
    model, found, is_member = team(group)
    check_rank(model, found, peer, role)
    if not is_member:
        raise GroupMembershipError(f"rank {model.topology.rank} isn't a member of {group!r}")
    if peer == model.topology.rank:
        raise ArgumentError(f"{role}={peer} is this rank itself")
    return model, found


def _as_row(model: ComputationModel, data: bytes) -> Tensor:
    return from_bytes(data, torch.uint8, (len(data),)).to(model.transport_device)
