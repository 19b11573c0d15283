"""Default exchange of any model, over its own all_gather of uint8 tensors.

Each blob goes in one frame of fixed size: its length as 8 bytes little-endian, then its first
bytes. Blobs that fit need one round. The frame's size never varies, so XLA compiles it once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.errors import CollectiveError
from unisono.payload.tensors import from_bytes, to_bytes
from unisono.topology import Group

if TYPE_CHECKING:
    from unisono.model.contract import ComputationModel

FRAME_BYTES = 256
INLINE_TENSOR_BYTES = 128
"""Size of the largest tensor that fits into a frame beside its header and the call's header."""
_LENGTH = struct.Struct("<Q")
_LARGEST_BYTES = 2**47  # the address space of a process
_INLINE_BYTES = FRAME_BYTES - _LENGTH.size


def as_frame(blob: bytes) -> bytes:
    """Return the frame of a blob: its length and its first bytes."""
    return (_LENGTH.pack(len(blob)) + blob[:_INLINE_BYTES]).ljust(FRAME_BYTES, b"\0")


def length_of(frame: bytes) -> int:
    """Read the length of the whole blob."""
    return int(_LENGTH.unpack_from(frame)[0])


def inline_part(frame: bytes) -> bytes | None:
    """Read the blob, or None if it doesn't fit into its frame."""
    size = length_of(frame)
    return frame[_LENGTH.size : _LENGTH.size + size] if size <= _INLINE_BYTES else None


def at_least_one(size_bytes: int) -> int:
    """Round a size up to at least 1, so that no tensor is empty."""
    return max(size_bytes, 1)


def exchange(
    model: ComputationModel,
    blob: bytes,
    group: Group | None,
    bucket: Callable[[int], int] = at_least_one,
) -> list[bytes]:
    """Return every rank's blob, in one round or two. Collective over `group`."""
    rows = model.all_gather(_tensor(model, as_frame(blob)), group).cpu()
    frames = [to_bytes(row) for row in rows]
    blobs = [part for frame in frames if (part := inline_part(frame)) is not None]
    if len(blobs) == len(frames):
        return blobs
    return exchange_bodies(model, blob, [*map(length_of, frames)], group, bucket)


def exchange_bodies(
    model: ComputationModel,
    blob: bytes,
    sizes: list[int],
    group: Group | None,
    bucket: Callable[[int], int] = at_least_one,
) -> list[bytes]:
    """Exchange blobs whose sizes every rank already knows. Collective over `group`."""
    # `bucket` rounds a size up, equally on all ranks: XLA compiles once for each shape.
    # A size beyond any memory comes from a damaged frame, or from another library's message.
    if max(sizes) > _LARGEST_BYTES:
        raise CollectiveError(
            f"the ranks announced {sizes} bytes, more than any memory: make all ranks call the same"
        )
    width = bucket(max(sizes))
    if 2 * sum(sizes) > width * len(sizes):
        rows = model.all_gather(_tensor(model, blob.ljust(width, b"\0")), group).cpu()
        return [to_bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]
    # One broadcast for each blob, because more than half of a gather would be padding.
    blobs = []
    for rank, size in zip(model.topology.members(group), sizes, strict=True):
        if size == 0:
            blobs.append(b"")  # all ranks know the size, so nothing is sent
            continue
        sent = blob if rank == model.topology.rank else b""
        row = model.broadcast(_tensor(model, sent.ljust(bucket(size), b"\0")), rank, group)
        blobs.append(to_bytes(row.cpu()[:size]))
    return blobs


def _tensor(model: ComputationModel, data: bytes) -> Tensor:
    return from_bytes(data, torch.uint8, (len(data),)).to(model.transport_device)
