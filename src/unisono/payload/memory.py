"""Tensor memory as bytes and back, without numpy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import PayloadError


def view_bytes(tensor: Tensor) -> memoryview:
    """Show the memory of a tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    buffer: Any = (ctypes.c_char * size).from_address(_address(tensor))
    buffer.owner = tensor  # keeps the memory alive as long as the view
    return memoryview(buffer).cast("B")


def to_bytes(tensor: Tensor) -> bytes:
    """Copy the memory of a contiguous CPU tensor. Local; raises as `view_bytes`."""
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(_address(tensor), size) if size else b""


def _address(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    is_plain = (
        tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())
    )
    if address == 0 or not is_plain:
        raise PayloadError(f"the memory of a {type(tensor).__qualname__} can't be read as it is")
    return address


def from_bytes(
    data: memoryview | bytes | bytearray, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Make a tensor of a copy of `data`."""
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise PayloadError(f"{len(data)} bytes aren't a tensor of {dtype} and shape {shape}")
    try:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError as error:  # a size of 0 hides others that torch can't take
        raise PayloadError(
            f"a tensor of {dtype} and shape {shape} can't be made: {error}"
        ) from error
    if len(data):
        view_bytes(tensor)[:] = data
    return tensor


def stack_bytes(rows: Sequence[bytes], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Make one tensor of the bytes of several, to compute with; its memory can't be resized."""
    data = bytearray().join(rows)
    if len(data) != len(rows) * math.prod(shape) * dtype.itemsize:
        raise PayloadError(
            f"{len(data)} bytes aren't {len(rows)} tensors of {dtype} and shape {shape}"
        )
    if not data:
        return torch.empty((len(rows), *shape), dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(len(rows), *shape)


def as_bytes_tensor(tensor: Tensor) -> Tensor:
    """See a contiguous tensor [*shape] as uint8 [*shape, itemsize], the same memory."""
    return tensor.unsqueeze(-1).view(torch.uint8)
