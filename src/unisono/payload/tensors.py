"""Conversion between tensors and headers with bytes, without numpy."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from pickle import PickleBuffer
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.errors import PayloadError

_DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_DTYPE_OF = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPES) if hasattr(torch, name)
}
_CODE_OF = {dtype: code for code, dtype in _DTYPE_OF.items()}
_HEAD = struct.Struct("<BBB")
_SHORT_BYTES = 2048  # for fewer bytes, a second copy is faster than creating a memoryview
_LARGEST_BYTES = 2**47  # the address space of a process
device: ContextVar[torch.device] = ContextVar("device")
"""Device onto which tensors of accelerators are loaded, as pickle has no argument for one."""
S = TypeVar("S")
T = TypeVar("T")


def onto_device(load: Callable[[S], T]) -> Callable[[S, torch.device], T]:
    """Make `device` a second argument of a function that loads tensors."""

    @wraps(load)
    def load_onto(source: S, target: torch.device) -> T:
        token = device.set(target)
        try:
            return load(source)
        finally:
            device.reset(token)

    return load_onto


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Facts of a tensor that peers need before they receive it."""

    # Packed, it is ``<BBB`` (dtype, flags, number of dimensions), then ``<q`` for each dimension.
    # Flags: 1 on an accelerator, 2 an ``nn.Parameter``, 4 a parameter that requires grad.

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_accelerator: bool
    parameter: bool | None = None
    """Whether an ``nn.Parameter`` requires grad; None for any other tensor."""

    def pack(self) -> bytes:
        """Return the header's bytes."""
        flags = self.on_accelerator + (0 if self.parameter is None else 2 + 4 * self.parameter)
        packed = _HEAD.pack(_CODE_OF[self.dtype], flags, len(self.shape))
        return packed + struct.pack(f"<{len(self.shape)}q", *self.shape)

    @classmethod
    def unpack(cls, data: memoryview | bytes, start: int = 0) -> tuple[TensorHeader, int]:
        """Return the header that begins at `start`, and the position after it."""
        code, flags, dims = _HEAD.unpack_from(data, start)
        sizes = struct.Struct(f"<{dims}q")
        shape = sizes.unpack_from(data, start + _HEAD.size)
        dtype = _DTYPE_OF[code]
        # A size of 0 counts as 1, as it would hide other sizes whose strides overflow in torch.
        extent = math.prod(max(size, 1) for size in shape)
        # An empty tensor takes no memory: only its strides must fit.
        most = _LARGEST_BYTES // dtype.itemsize if 0 not in shape else 2**62
        has_no_grad = not (dtype.is_floating_point or dtype.is_complex)
        if extent > most or any(size < 0 for size in shape) or (flags & 4 and has_no_grad):
            raise PayloadError(f"received a damaged frame: {dtype} of shape {shape}")
        parameter = bool(flags & 4) if flags & 2 else None
        return cls(dtype, shape, bool(flags & 1), parameter), start + _HEAD.size + sizes.size

    def finish(self, tensor: Tensor) -> Tensor:
        """Return a received tensor with the sender's type."""
        if self.parameter is None:
            return tensor
        return Parameter(tensor, requires_grad=self.parameter)

    def tensor(self, data: memoryview | bytes) -> Tensor:
        """Create the tensor from a copy of its bytes."""
        tensor = from_bytes(data, self.dtype, self.shape)
        return self.finish(tensor.to(device.get()) if self.on_accelerator else tensor)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def head_of(tensor: Tensor) -> TensorHeader:
    """Return the header that peers need to receive `tensor`."""
    parameter = tensor.requires_grad if type(tensor) is Parameter else None
    return TensorHeader(tensor.dtype, tuple(tensor.shape), not tensor.is_cpu, parameter)


def taken_apart(tensor: Tensor) -> tuple[bytes, bytes | memoryview]:
    """Return the header of a dense tensor, and its bytes in C order, on the CPU."""
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    is_short = data.nbytes <= _SHORT_BYTES
    return head_of(tensor).pack(), to_bytes(data) if is_short else view_bytes(data)


def reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Return the pickle reduction of a dense tensor; a large one is an out-of-band buffer."""
    head, data = taken_apart(tensor)
    return put_together, (head, PickleBuffer(data) if isinstance(data, memoryview) else data)


class _PutTogether:
    """Rebuilds a tensor from the arguments of `reduce_tensor`."""

    # An object without attributes, not a function, whose attributes a malicious pickle could set.
    __slots__ = ()

    def __call__(self, head: bytes, data: Any) -> Tensor:
        return TensorHeader.unpack(head)[0].tensor(memoryview(data))

    def __reduce__(self) -> str:
        return "put_together"


put_together: _PutTogether = _PutTogether()


def is_dense(value: object) -> bool:
    """Return whether `value` is a tensor that can be sent as plain memory."""
    # Subclasses with a `__torch_dispatch__` (DTensor, masked, fake, jagged) and wrappers of
    # torch.func aren't dense: they have no memory of their own that could be read.
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
        # On the CPU an address of 0 shows that there is no memory; only an empty tensor needs none.
        return not value.is_cpu or value.data_ptr() != 0 or value.numel() == 0
    except RuntimeError:  # wrappers of torch.func have no storage
        return False


def is_exact(value: object) -> bool:
    """Return whether `value` is exactly a dense tensor; others are sent as objects."""
    return type(value) in (Tensor, Parameter) and is_dense(value)


def why_not_dense(tensor: Tensor) -> str:
    """Return why a tensor can't be sent as plain memory, and the remedy."""
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
    """Return a detached plain `Tensor` that shares memory with `tensor`."""
    # `detach` of a subclass may run its own code.
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        tensor = tensor.as_subclass(Tensor)
    return tensor.detach()


def reach_bytes(tensor: Tensor) -> int:
    """Return the bytes between a tensor's ends; 0 if it is empty or has a stride of 0."""
    steps = list(zip(tensor.shape, tensor.stride(), strict=True))
    # A stride of 0 marks an expanded tensor, whose elements share memory.
    if not tensor.numel() or any(stride == 0 and size > 1 for size, stride in steps):
        return 0
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


def view_bytes(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's bytes."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:  # an empty tensor may have no address
        return memoryview(b"")
    buffer: Any = (ctypes.c_char * size).from_address(_address(tensor))
    buffer.owner = tensor  # keeps the memory alive as long as the view
    return memoryview(buffer).cast("B")


def to_bytes(tensor: Tensor) -> bytes:
    """Copy the bytes of a contiguous CPU tensor."""
    size = tensor.numel() * tensor.element_size()
    return ctypes.string_at(_address(tensor), size) if size else b""


def _address(tensor: Tensor) -> int:
    """Return the address of a contiguous CPU tensor; raise if it doesn't hold the values."""
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
    """Create a tensor from a copy of `data`."""
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise PayloadError(f"{len(data)} bytes aren't a tensor of {dtype} and shape {shape}")
    try:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError as error:  # a size of 0 hides other sizes that are too large for torch
        raise PayloadError(
            f"a tensor of {dtype} and shape {shape} can't be created: {error}"
        ) from error
    if len(data):
        view_bytes(tensor)[:] = data
    return tensor


def stack_bytes(rows: Sequence[bytes], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Create one tensor from the bytes of several; it supports all operations but a resize."""
    data = bytearray().join(rows)
    if len(data) != len(rows) * math.prod(shape) * dtype.itemsize:
        raise PayloadError(
            f"{len(data)} bytes aren't {len(rows)} tensors of {dtype} and shape {shape}"
        )
    if not data:  # `frombuffer` rejects an empty buffer
        return torch.empty((len(rows), *shape), dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(len(rows), *shape)


def as_bytes_tensor(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor [*shape] as uint8 [*shape, itemsize], sharing its memory."""
    return tensor.unsqueeze(-1).view(torch.uint8)
