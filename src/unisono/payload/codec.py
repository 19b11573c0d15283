"""Codec: Python values as bytes and back, exact in value and type.

A frame is one value: a tag of one byte, then its body; integers are little-endian.

    N T F       None, True, False
    i <q        int of 64 bits          I <I bytes    longer int, two's complement, in containers
    d <d        float                   c <2d         complex
    s <Q bytes  str, UTF-8 with lone surrogates       p    the same, a pathlib.Path
    b <Q bytes  bytes                   y             the same, a bytearray
    l t <I      list, tuple: that many frames         m <I  dict: that many pairs of frames
    x           tensor: header, then its memory       h     tensor: header alone
    o <I <I     object: CRC-32 of the first block, number of blocks, then each as <Q bytes; the
                first is a pickle, the others are its buffers
    e <Q bytes  the sender's value couldn't be encoded: the reason, as UTF-8

The header of a tensor is ``<BBB`` (dtype, flags, number of dimensions), then ``<q`` for each
dimension. The flags: 1 it is on an accelerator, 2 it is an ``nn.Parameter``, 4 that requires grad.

The only file that knows payload types.
"""

from __future__ import annotations

import importlib
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.errors import PayloadError
from unisono.payload.memory import from_bytes, view_bytes

_DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_DTYPE_OF = {
    code: getattr(torch, name) for code, name in enumerate(_DTYPES) if hasattr(torch, name)
}
CODE_OF = {dtype: code for code, dtype in _DTYPE_OF.items()}
HEAD = struct.Struct("<BBB")
SIZE = struct.Struct("<Q")
COUNT = struct.Struct("<I")
_TWO_COUNTS = struct.Struct("<II")
_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<2d")
_LARGEST_BYTES = 2**47  # what one process can address


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a rank says of its tensor before the tensor itself travels."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_accelerator: bool
    parameter: bool | None = None
    """Whether it is an ``nn.Parameter`` that requires grad; None for a tensor that is none."""

    @property
    def flags(self) -> int:
        """The second byte of the header."""
        return self.on_accelerator + (0 if self.parameter is None else 2 + 4 * self.parameter)

    def finish(self, tensor: Tensor) -> Tensor:
        """Make what the sender had of a tensor that arrived."""
        if self.parameter is None:
            return tensor
        return torch.nn.Parameter(tensor, requires_grad=self.parameter)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def refuse_pickle(what: str) -> None:
    """Refuse what needs pickle where the user doesn't allow it."""
    if os.environ.get("UNISONO_NO_PICKLE") == "1":
        raise PayloadError(
            f"{what} needs pickle, which UNISONO_NO_PICKLE=1 refuses: send numbers, str, bytes, "
            "tensors, or lists, tuples and dicts of them"
        )


# An unknown tag or dtype, bytes that aren't text, a key that can't be hashed, endless nesting.
_DAMAGE = (KeyError, UnicodeDecodeError, TypeError, RecursionError)


def decode(blob: bytes, device: torch.device) -> Any:
    """Decode one frame."""
    data = memoryview(blob)
    try:
        value, end = _READERS[data[0]](data, 1, device)
    except PayloadError:
        raise
    except (IndexError, struct.error):
        raise PayloadError("a damaged frame came: it ends too early") from None
    except _DAMAGE as error:
        raise PayloadError(f"a damaged frame came: {type(error).__name__}: {error}") from error
    if end != len(blob):
        raise PayloadError(f"a damaged frame came: {len(blob) - end} bytes are left over")
    return value


# A reader takes a frame, where the body begins, and the device; it gives the value and the end.


def _block_at(data: memoryview, at: int) -> tuple[memoryview, int]:
    start = at + SIZE.size
    end = start + SIZE.unpack_from(data, at)[0]
    if end > len(data):
        raise IndexError
    return data[start:end], end


def _text_at(data: memoryview, at: int, _: torch.device) -> tuple[str, int]:
    block, end = _block_at(data, at)
    return str(block, "utf-8", "surrogatepass"), end


def _path_at(data: memoryview, at: int, device: torch.device) -> tuple[Path, int]:
    text, end = _text_at(data, at, device)
    return Path(text), end


def _bytes_at(data: memoryview, at: int, _: torch.device) -> tuple[bytes, int]:
    block, end = _block_at(data, at)
    return bytes(block), end


def _bytearray_at(data: memoryview, at: int, _: torch.device) -> tuple[bytearray, int]:
    block, end = _block_at(data, at)
    return bytearray(block), end


def _int_at(data: memoryview, at: int, _: torch.device) -> tuple[int, int]:
    return _INT.unpack_from(data, at)[0], at + _INT.size


def _long_int_at(data: memoryview, at: int, _: torch.device) -> tuple[int, int]:
    start = at + COUNT.size
    end = start + COUNT.unpack_from(data, at)[0]
    if end > len(data):
        raise IndexError
    return int.from_bytes(data[start:end], "little", signed=True), end


def _float_at(data: memoryview, at: int, _: torch.device) -> tuple[float, int]:
    return _FLOAT.unpack_from(data, at)[0], at + _FLOAT.size


def _complex_at(data: memoryview, at: int, _: torch.device) -> tuple[complex, int]:
    return complex(*_COMPLEX.unpack_from(data, at)), at + _COMPLEX.size


def _list_at(data: memoryview, at: int, device: torch.device) -> tuple[list[Any], int]:
    items: list[Any] = []
    count = COUNT.unpack_from(data, at)[0]
    at += COUNT.size
    for _ in range(count):
        item, at = _READERS[data[at]](data, at + 1, device)
        items.append(item)
    return items, at


def _tuple_at(data: memoryview, at: int, device: torch.device) -> tuple[tuple[Any, ...], int]:
    items, end = _list_at(data, at, device)
    return tuple(items), end


def _dict_at(data: memoryview, at: int, device: torch.device) -> tuple[dict[Any, Any], int]:
    pairs: dict[Any, Any] = {}
    count = COUNT.unpack_from(data, at)[0]
    at += COUNT.size
    for _ in range(count):
        key, at = _READERS[data[at]](data, at + 1, device)
        pairs[key], at = _READERS[data[at]](data, at + 1, device)
    return pairs, at


def _header_at(data: memoryview, at: int, _: torch.device) -> tuple[TensorHeader, int]:
    code, flags, dims = HEAD.unpack_from(data, at)
    sizes = struct.Struct(f"<{dims}q")
    shape = sizes.unpack_from(data, at + HEAD.size)
    dtype = _DTYPE_OF[code]
    # Not the product of all: a size of 0 would hide others whose strides torch can't count.
    extent = math.prod(max(size, 1) for size in shape)
    most = _LARGEST_BYTES // dtype.itemsize if 0 not in shape else 2**62
    requires_grad = flags & 4 and not (dtype.is_floating_point or dtype.is_complex)
    if extent > most or any(size < 0 for size in shape) or requires_grad:
        raise PayloadError(f"a damaged frame came: {dtype} of shape {shape}")
    parameter = bool(flags & 4) if flags & 2 else None
    return TensorHeader(dtype, shape, bool(flags & 1), parameter), at + HEAD.size + sizes.size


def _tensor_at(data: memoryview, at: int, device: torch.device) -> tuple[Tensor, int]:
    head, start = _header_at(data, at, device)
    end = start + math.prod(head.shape) * head.dtype.itemsize
    if end > len(data):
        raise IndexError
    tensor = from_bytes(data[start:end], head.dtype, head.shape)
    return head.finish(tensor.to(device) if head.on_accelerator else tensor), end


def _object_at(data: memoryview, at: int, device: torch.device) -> tuple[Any, int]:
    refuse_pickle("an object that came")
    checksum, count = _TWO_COUNTS.unpack_from(data, at)
    at += _TWO_COUNTS.size
    blocks: list[bytearray] = []  # not bytes: an array that could be written to stays so
    for _ in range(count):
        block, at = _bytearray_at(data, at, device)
        blocks.append(block)
    if not blocks or zlib.crc32(blocks[0]) != checksum:
        raise PayloadError("a damaged frame came: a pickle with a wrong checksum")
    return importlib.import_module("unisono.payload.pickling").load(blocks, device), at


def _failure_at(data: memoryview, at: int, device: torch.device) -> tuple[Any, int]:
    raise PayloadError(_text_at(data, at, device)[0])


_READERS: dict[int, Callable[[memoryview, int, torch.device], tuple[Any, int]]] = {
    ord("N"): lambda _, at, __: (None, at),
    ord("T"): lambda _, at, __: (True, at),
    ord("F"): lambda _, at, __: (False, at),
    ord("i"): _int_at,
    ord("I"): _long_int_at,
    ord("d"): _float_at,
    ord("c"): _complex_at,
    ord("s"): _text_at,
    ord("p"): _path_at,
    ord("b"): _bytes_at,
    ord("y"): _bytearray_at,
    ord("l"): _list_at,
    ord("t"): _tuple_at,
    ord("m"): _dict_at,
    ord("x"): _tensor_at,
    ord("h"): _header_at,
    ord("o"): _object_at,
    ord("e"): _failure_at,
}


_INT64 = range(-(2**63), 2**63)
_NUMBERS = (bool, int, float, complex)

# A reader needs more stack than a writer: what is nested deeper is left to pickle.
_DEEPEST = 64


class _Chunks(list[Any]):
    """The pieces of a frame, and how deep in containers its writer is."""

    depth = 0

    def go_down(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise RecursionError


def is_number(value: object) -> bool:
    """Return whether `value` is exactly a bool, int, float or complex."""
    return type(value) in _NUMBERS


def is_dense(value: object) -> bool:
    """Return whether `value` is a tensor that travels as plain memory."""
    # Not those without memory of their own: a subclass whose operations are its own (DTensor,
    # masked, fake, jagged), or what torch.func wraps, has none that could be read.
    if not (
        isinstance(value, Tensor)
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
        and value.layout is torch.strided
        and value.dtype in CODE_OF
        and not value.is_meta
        and not value.is_nested
    ):
        return False
    try:
        return not value.is_cpu or value.data_ptr() != 0 or value.numel() == 0
    except RuntimeError:  # what torch.func wraps has no storage
        return False


def why_not_dense(tensor: Tensor) -> str:
    """Say what a tensor is that doesn't travel as plain memory, and what to do."""
    kind = type(tensor)
    if _is_distributed(kind):
        return (
            f"not a {kind.__name__}, which is spread over the ranks: call to_local() for this "
            "rank's part or full_tensor() for the whole first"
        )
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return (
            f"not a {kind.__name__}, which has no memory of its own: make a plain tensor of it "
            "first, or send it inside a list as an object"
        )
    if tensor.is_nested:
        return "not nested ones: call unbind() first and send the list of its tensors"
    if tensor.layout is torch.strided and tensor.dtype in CODE_OF and not tensor.is_meta:
        return "not one without memory of its own, as within torch.func: send it from outside"
    return (
        f"not {tensor.layout} of {tensor.dtype} on {tensor.device}: call to_dense() first, or send "
        "it inside a list as an object"
    )


def _is_distributed(kind: type) -> bool:
    return hasattr(kind, "to_local") and hasattr(kind, "full_tensor")


def plain(tensor: Tensor) -> Tensor:
    """Return a dense tensor as one of torch's own class, without gradient, the same memory."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        tensor = tensor.as_subclass(Tensor)
    return tensor.detach()


def is_exact(value: object) -> bool:
    """Return whether `value` is nothing but a dense tensor; others go as objects."""
    return type(value) in (Tensor, Parameter) and is_dense(value)


def head_of(tensor: Tensor) -> TensorHeader:
    """Return what peers must know to receive `tensor`."""
    parameter = tensor.requires_grad if type(tensor) is Parameter else None
    return TensorHeader(tensor.dtype, tuple(tensor.shape), not tensor.is_cpu, parameter)


def header(tensor: Tensor) -> bytes:
    """Encode what peers must know to receive `tensor`."""
    return b"h" + _tensor_head(tensor)


def failure(reason: str) -> bytes:
    """Encode that this rank has no value to send, and why."""
    text = reason.encode("utf-8", "replace")
    return b"e" + SIZE.pack(len(text)) + text


def encode(value: object) -> bytes:
    """Encode any value."""
    if type(value) is int and value not in _INT64:
        what = value if value.bit_length() < 200 else f"an int of {value.bit_length()} bits"
        raise PayloadError(f"{what} doesn't fit into 64 bits: send it in a list")
    chunks = _Chunks()
    try:
        _WRITERS.get(type(value), _write_other)(value, chunks)
    except RecursionError:  # nested deeply, or a container that holds itself: pickle knows how
        chunks = _Chunks()
        _write_object(value, chunks)
    return b"".join(chunks)


def encode_or_reason(value: object) -> bytes:
    """Encode a value, or the reason why that is impossible, for every rank to see."""
    return frame_or_reason(encode, value)


def frame_or_reason(make: Callable[..., bytes], *args: Any) -> bytes:
    """Return the frame that `make` makes, or the reason why it can't, for every rank to see."""
    # Whatever is raised counts: the user's own code is called, and a rank that left here would
    # let the others wait for it.
    try:
        return make(*args)
    except Exception as error:  # a repr, a property, a __float__ may raise anything
        return failure(reason(error))


def reason(error: Exception) -> str:
    """Say what was raised while a value was encoded, whatever that is."""
    try:
        text = str(error)
    except Exception:  # its own __str__ may raise as well
        text = ""
    return text if isinstance(error, PayloadError) else f"{type(error).__name__}: {text}"


def _write_other(value: Any, out: _Chunks) -> None:
    if is_exact(value):
        _write_tensor(value, out)
    else:
        _write_object(value, out)


def _write_int(value: int, out: _Chunks) -> None:
    if value in _INT64:
        out.append(struct.pack("<cq", b"i", value))
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        out += (b"I", COUNT.pack(len(data)), data)


def _write_text(value: str, out: _Chunks, tag: bytes = b"s") -> None:
    data = value.encode("utf-8", "surrogatepass")
    out += (tag, SIZE.pack(len(data)), data)


def _write_block(tag: bytes, data: Any, out: _Chunks) -> None:
    out += (tag, SIZE.pack(len(data)), data)


def _write_items(tag: bytes, items: Sequence[Any], out: _Chunks) -> None:
    out.go_down()
    out += (tag, COUNT.pack(len(items)))
    for item in items:
        _WRITERS.get(type(item), _write_other)(item, out)
    out.depth -= 1


def _write_dict(value: dict[Any, Any], out: _Chunks) -> None:
    out.go_down()
    out += (b"m", COUNT.pack(len(value)))
    for key, item in value.items():
        _WRITERS.get(type(key), _write_other)(key, out)
        _WRITERS.get(type(item), _write_other)(item, out)
    out.depth -= 1


def _tensor_head(tensor: Tensor) -> bytes:
    head = head_of(tensor)
    packed = HEAD.pack(CODE_OF[head.dtype], head.flags, len(head.shape))
    return packed + struct.pack(f"<{len(head.shape)}q", *head.shape)


def _write_tensor(value: Tensor, out: _Chunks) -> None:
    data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    out += (b"x", _tensor_head(value), view_bytes(data))


def _write_object(value: object, out: _Chunks) -> None:
    refuse_pickle(f"a {type(value).__qualname__}")
    blocks = importlib.import_module("unisono.payload.pickling").dump(value)
    out += (b"o", COUNT.pack(zlib.crc32(blocks[0])), COUNT.pack(len(blocks)))
    for block in blocks:
        _write_block(b"", block, out)


_WRITERS: dict[type, Callable[[Any, _Chunks], None]] = {
    type(None): lambda _, out: out.append(b"N"),
    bool: lambda value, out: out.append(b"T" if value else b"F"),
    int: _write_int,
    float: lambda value, out: out.append(struct.pack("<cd", b"d", value)),
    complex: lambda value, out: out.append(struct.pack("<c2d", b"c", value.real, value.imag)),
    str: _write_text,
    bytes: lambda value, out: _write_block(b"b", value, out),
    bytearray: lambda value, out: _write_block(b"y", bytes(value), out),
    list: lambda value, out: _write_items(b"l", value, out),
    tuple: lambda value, out: _write_items(b"t", value, out),
    dict: _write_dict,
    type(Path()): lambda value, out: _write_text(str(value), out, b"p"),
}


def raise_failures(frames: Sequence[bytes], ranks: Callable[[], Sequence[int]], call: str) -> None:
    """Raise the same error on every rank if some rank had no value to send."""
    for first in frames:
        if first[:1] == b"e":
            break
    else:
        return
    reasons = [
        f"rank {rank}: {bytes(frame[1 + SIZE.size :]).decode('utf-8', 'replace')}"
        for rank, frame in zip(ranks(), frames, strict=True)
        if frame[:1] == b"e"
    ]
    raise PayloadError(f"{call} got a value that can't be sent ({'; '.join(reasons)})")
