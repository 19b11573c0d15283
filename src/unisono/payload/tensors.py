"""Tensors as headers and bytes, and back, without numpy."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.errors import PayloadError

_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPE_OF = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPES) if hasattr(torch, name)
}
_CODE_OF = {dtype: code for code, dtype in _DTYPE_OF.items()}
_HEAD = struct.Struct("<BBB")
_SHORT_BYTES = 2048  # copied twice sooner than shown once
_LARGEST_BYTES = 2**47  # what one process can address
device: ContextVar[torch.device] = ContextVar("device")
"""Where tensors of accelerators are put: pickle has no argument for it."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What peers know of a tensor before it travels."""

    # Its bytes are ``<BBB`` (dtype, flags, number of dimensions), then ``<q`` for each dimension.
    # The flags: 1 it is on an accelerator, 2 it is an ``nn.Parameter``, 4 that requires grad.

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_accelerator: bool
    parameter: bool | None = None
    """Whether it is an ``nn.Parameter`` that requires grad; None for a tensor that is none."""

    def pack(self) -> bytes:
        """Return its bytes."""
        flags = self.on_accelerator + (0 if self.parameter is None else 2 + 4 * self.parameter)
        packed = _HEAD.pack(_CODE_OF[self.dtype], flags, len(self.shape))
        return packed + struct.pack(f"<{len(self.shape)}q", *self.shape)

    @classmethod
    def unpack(cls, data: memoryview | bytes, at: int = 0) -> tuple[TensorHeader, int]:
        """Read a header and where it ends."""
        code, flags, dims = _HEAD.unpack_from(data, at)
        sizes = struct.Struct(f"<{dims}q")
        shape = sizes.unpack_from(data, at + _HEAD.size)
        dtype = _DTYPE_OF[code]
        # Not the product of all: a size of 0 would hide others whose strides torch can't count.
        extent = math.prod(max(size, 1) for size in shape)
        most = _LARGEST_BYTES // dtype.itemsize if 0 not in shape else 2**62
        requires_grad = flags & 4 and not (dtype.is_floating_point or dtype.is_complex)
        if extent > most or any(size < 0 for size in shape) or requires_grad:
            raise PayloadError(f"a damaged frame came: {dtype} of shape {shape}")
        parameter = bool(flags & 4) if flags & 2 else None
        return cls(dtype, shape, bool(flags & 1), parameter), at + _HEAD.size + sizes.size

    def finish(self, tensor: Tensor) -> Tensor:
        """Make what the sender had of a tensor that arrived."""
        if self.parameter is None:
            return tensor
        return Parameter(tensor, requires_grad=self.parameter)

    def tensor(self, data: memoryview | bytes) -> Tensor:
        """Make the tensor of a copy of its memory."""
        tensor = from_bytes(data, self.dtype, self.shape)
        return self.finish(tensor.to(device.get()) if self.on_accelerator else tensor)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def head_of(tensor: Tensor) -> TensorHeader:
    """Return what peers must know to receive `tensor`."""
    parameter = tensor.requires_grad if type(tensor) is Parameter else None
    return TensorHeader(tensor.dtype, tuple(tensor.shape), not tensor.is_cpu, parameter)


def taken_apart(tensor: Tensor) -> tuple[bytes, bytes | memoryview]:
    """Return the header of a dense tensor, and its memory on the CPU in C order."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    is_short = data.nbytes <= _SHORT_BYTES
    return head_of(tensor).pack(), to_bytes(data) if is_short else view_bytes(data)


def reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Return how pickle rebuilds a dense tensor; long memory is a buffer beside the pickle."""
    head, data = taken_apart(tensor)
    return put_together, (head, PickleBuffer(data) if isinstance(data, memoryview) else data)


class _PutTogether:
    """Makes the tensor that `reduce_tensor` took apart."""

    # Not a function: a pickle may set attributes of what it names, and this has none.
    __slots__ = ()

    def __call__(self, head: bytes, data: Any) -> Tensor:
        return TensorHeader.unpack(head)[0].tensor(memoryview(data))

    def __reduce__(self) -> str:
        return "put_together"


put_together: _PutTogether = _PutTogether()


def is_dense(value: object) -> bool:
    """Return whether `value` is a tensor that travels as plain memory."""
    # Not those without memory of their own: a subclass whose operations are its own (DTensor,
    # masked, fake, jagged), or what torch.func wraps, has none that could be read.
    if not (
        isinstance(value, Tensor)
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        and value.layout is torch.strided
        and value.dtype in _CODE_OF
        and not value.is_meta
        and not value.is_nested
    ):
        return False
    try:
        return not value.is_cpu or value.data_ptr() != 0 or value.numel() == 0
    except RuntimeError:  # what torch.func wraps has no storage
        return False


def is_exact(value: object) -> bool:
    """Return whether `value` is nothing but a dense tensor; others go as objects."""
    return type(value) in (Tensor, Parameter) and is_dense(value)


def why_not_dense(tensor: Tensor) -> str:
    """Return why a tensor doesn't travel as plain memory, and what to do."""
    kind = type(tensor)
    if hasattr(kind, "to_local") and hasattr(kind, "full_tensor"):
        return (
            f"not a {kind.__name__}, which is spread over the ranks: call to_local() for this "
            "rank's part or full_tensor() for the whole first"
        )
    if tensor.is_nested:
        return "not nested ones: call unbind() first and send the list of its tensors"
    is_own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    is_strided = tensor.layout is torch.strided and tensor.dtype in _CODE_OF
    if is_strided and not is_own and not tensor.is_meta:
        return "not one without memory of its own, as within torch.func: send it from outside"
    if is_own or is_strided:
        return (
            f"not a {kind.__name__} without memory of its own: make "
            "a plain tensor of it first, or send it inside a list as an object"
        )
    return (
        f"not {tensor.layout} of {tensor.dtype} on {tensor.device}: call to_dense() first, or send "
        "it inside a list as an object"
    )


def plain(tensor: Tensor) -> Tensor:
    """Return a dense tensor as one of torch's own class, without gradient, the same memory."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        tensor = tensor.as_subclass(Tensor)
    return tensor.detach()


def reach_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first to the last of a tensor, 0 if two elements are one place."""
    steps = list(zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or any(stride == 0 and size > 1 for size, stride in steps):
        return 0
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def view_bytes(tensor: Tensor) -> memoryview:
    """Show the memory of a tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    buffer: Any = (ctypes.c_char * size).from_address(_address(tensor))
    buffer.owner = tensor  # keeps the memory alive as long as the view
    return memoryview(buffer).cast("B")


def to_bytes(tensor: Tensor) -> bytes:
    """Copy the memory of a contiguous CPU tensor."""
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
