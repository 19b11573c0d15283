"""The wire format of values, and its reader.

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
"""

from __future__ import annotations

import importlib
import math
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono._memory import from_bytes
from unisono.errors import PayloadError

__all__ = ("CODE_OF", "COUNT", "HEAD", "SIZE", "TensorHeader", "decode", "refuse_pickle")

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
        """Make what the sender had of a tensor that arrived. Local."""
        if self.parameter is None:
            return tensor
        return torch.nn.Parameter(tensor, requires_grad=self.parameter)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def refuse_pickle(what: str) -> None:
    """Refuse what needs pickle where the user doesn't allow it. Local.

    Raises:
        PayloadError: ``UNISONO_NO_PICKLE`` is 1.
    """
    if os.environ.get("UNISONO_NO_PICKLE") == "1":
        raise PayloadError(
            f"{what} needs pickle, which UNISONO_NO_PICKLE=1 refuses: send numbers, str, bytes, "
            "tensors, or lists, tuples and dicts of them"
        )


# An unknown tag or dtype, bytes that are no text, a dict's key that can't be one, endless nesting.
_DAMAGE = (KeyError, UnicodeDecodeError, TypeError, RecursionError)


def decode(blob: bytes, device: torch.device) -> Any:
    """Decode one frame.

    Local.

    Args:
        blob: what `encode`, `header` or `failure` gave on some rank.
        device: where tensors go that were on an accelerator.

    Returns:
        The value; a `TensorHeader` for a header alone.

    Raises:
        PayloadError: the frame says that the sender failed, or it is damaged.
    """
    reader = _Reader(memoryview(blob), device)
    try:
        value = reader.value()
    except PayloadError:
        raise
    except (IndexError, struct.error):
        raise PayloadError("a damaged frame came: it ends too early") from None
    except _DAMAGE as error:
        raise PayloadError(f"a damaged frame came: {type(error).__name__}: {error}") from error
    if reader.at != len(blob):
        raise PayloadError(f"a damaged frame came: {len(blob) - reader.at} bytes are left over")
    return value


class _Reader:
    """A place in a frame."""

    def __init__(self, data: memoryview, device: torch.device) -> None:
        self._data = data
        self._device = device
        self.at = 0

    def value(self) -> Any:
        tag = self._data[self.at]
        self.at += 1
        return _READERS[tag](self)

    def _take(self, size: int) -> memoryview:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise IndexError
        return self._data[start : self.at]

    def unpack(self, shape: struct.Struct) -> tuple[Any, ...]:
        start, self.at = self.at, self.at + shape.size
        return shape.unpack_from(self._data, start)

    def view(self) -> memoryview:
        return self._take(self.unpack(SIZE)[0])

    def block(self) -> bytes:
        return bytes(self.view())

    def text(self) -> str:
        return str(self.view(), "utf-8", "surrogatepass")

    def long_int(self) -> int:
        return int.from_bytes(self._take(self.unpack(COUNT)[0]), "little", signed=True)

    def items(self) -> list[Any]:
        return [self.value() for _ in range(self.unpack(COUNT)[0])]

    def pairs(self) -> dict[Any, Any]:
        return {self.value(): self.value() for _ in range(self.unpack(COUNT)[0])}

    def header(self) -> TensorHeader:
        code, flags, dims = self.unpack(HEAD)
        shape = self.unpack(struct.Struct(f"<{dims}q"))
        dtype = _DTYPE_OF[code]
        # Not the product of all: a size of 0 would hide others whose strides torch can't count.
        extent = math.prod(max(size, 1) for size in shape)
        most = _LARGEST_BYTES // dtype.itemsize if 0 not in shape else 2**62
        requires_grad = flags & 4 and not (dtype.is_floating_point or dtype.is_complex)
        if extent > most or any(size < 0 for size in shape) or requires_grad:
            raise PayloadError(f"a damaged frame came: {dtype} of shape {shape}")
        return TensorHeader(dtype, shape, bool(flags & 1), bool(flags & 4) if flags & 2 else None)

    def tensor(self) -> Tensor:
        head = self.header()
        data = self._take(math.prod(head.shape) * head.dtype.itemsize)
        tensor = from_bytes(data, head.dtype, head.shape)
        return head.finish(tensor.to(self._device) if head.on_accelerator else tensor)

    def object(self) -> Any:
        refuse_pickle("an object that came")
        (checksum,) = self.unpack(COUNT)
        # Not bytes: an array that could be written to shall be so again.
        blocks = [bytearray(self.view()) for _ in range(self.unpack(COUNT)[0])]
        if not blocks or zlib.crc32(blocks[0]) != checksum:
            raise PayloadError("a damaged frame came: a pickle with a wrong checksum")
        return importlib.import_module("unisono._objects").load(blocks, self._device)

    def sender_failed(self) -> Any:
        raise PayloadError(self.text())


_READERS: dict[int, Callable[[_Reader], Any]] = {
    ord("N"): lambda _: None,
    ord("T"): lambda _: True,
    ord("F"): lambda _: False,
    ord("i"): lambda reader: reader.unpack(_INT)[0],
    ord("I"): _Reader.long_int,
    ord("d"): lambda reader: reader.unpack(_FLOAT)[0],
    ord("c"): lambda reader: complex(*reader.unpack(_COMPLEX)),
    ord("s"): _Reader.text,
    ord("p"): lambda reader: Path(reader.text()),
    ord("b"): _Reader.block,
    ord("y"): lambda reader: bytearray(reader.view()),
    ord("l"): _Reader.items,
    ord("t"): lambda reader: tuple(reader.items()),
    ord("m"): _Reader.pairs,
    ord("x"): _Reader.tensor,
    ord("h"): _Reader.header,
    ord("o"): _Reader.object,
    ord("e"): _Reader.sender_failed,
}
