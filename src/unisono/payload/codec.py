"""Codec between Python values and bytes, exact in value and type.

A frame is one value: a tag of one byte, then its body; integers are little-endian.

    N T F           None, True, False
    i <q   d <d     int of 64 bits, float
    s b             str, UTF-8 with lone surrogates; bytes
    v <I pickle     other values of Python's own types: CRC-32 of the pickle, then the pickle
    p <I pickle     the same with tensors, paths or complex numbers
    q <I blocks     the same with buffers: CRC-32 of the first block, then each block as its length
                    (<Q) and its bytes; the first is a pickle, the others are its buffers
    o <I blocks     any object, likewise; rejected under UNISONO_NO_PICKLE=1
    x h             a tensor, as its header and its memory; the header alone
    e               the sender's value couldn't be encoded: the reason, as UTF-8

Pickles have protocol 5. Those of ``v``, ``p`` and ``q`` refer only to names in `_GLOBALS`.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.errors import PayloadError
from unisono.payload import tensors
from unisono.payload.tensors import (
    TensorHeader,
    head_of,
    is_exact,
    onto_device,
    put_together,
    reduce_tensor,
)

_SIZE = struct.Struct("<Q")
_PICKLE = struct.Struct("<cI")
_INT, _FLOAT = struct.Struct("<cq"), struct.Struct("<cd")
_VARIABLES: Mapping[Any, Any] = os.environ._data  # type: ignore[attr-defined]
_NO_PICKLE: Any = os.environ.encodekey("UNISONO_NO_PICKLE")
_PATH = type(Path())


def _is_restricted() -> bool:
    # This is called for each frame, and the variable is mostly unset: then `os.environ.get` would
    # raise and catch a KeyError, which takes longer than reading a value.
    return _VARIABLES.get(_NO_PICKLE) in ("1", b"1")


def check_pickle_allowed(what: str) -> None:
    """Raise if `what` needs pickle and the user has disabled it."""
    if _is_restricted():
        raise PayloadError(
            f"{what} needs pickle, which UNISONO_NO_PICKLE=1 refuses: send numbers, str, bytes, "
            "tensors, or lists, tuples, sets and dicts of them"
        )


class _MakePath:
    # No attributes, which a malicious pickle could set, as in `tensors._PutTogether`.
    __slots__ = ()

    def __call__(self, text: str) -> Path:
        return Path(text)

    def __reduce__(self) -> str:
        return "make_path"


make_path: _MakePath = _MakePath()
_GLOBALS: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "complex"): complex,
    (__name__, "make_path"): make_path,
    (tensors.__name__, "put_together"): put_together,
}


class _NotPlainError(Exception):
    """An object that isn't a plain value, so that `payload.pickling` must encode it."""


class _Pickler(pickle.Pickler):
    """Pickles only plain values, into a list of chunks."""

    # `reducer_override` isn't called for Python's own types, but for all others.

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.buffers: list[pickle.PickleBuffer] = []
        self.has_globals = False
        self.write = self.chunks.append
        # It is its own file, whose only method is `write`.
        super().__init__(self, 5, buffer_callback=self.buffers.append)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if obj is put_together or obj is complex or obj is make_path:  # pickled by name
            return NotImplemented
        self.has_globals = True  # the frame is a `p`: it names one of `_GLOBALS`
        if is_exact(obj):
            return reduce_tensor(obj)
        if kind is _PATH:
            return make_path, (str(obj),)
        if kind is complex:
            return complex, (obj.real, obj.imag)
        raise _NotPlainError(obj)

    def take(self) -> bytes:
        """Return the frame of the dumped value, and reset for the next."""
        chunks, buffers, checksum = self.chunks, self.buffers, 0
        if buffers:
            frame = _packed(b"q", [b"".join(chunks), *(buffer.raw() for buffer in buffers)])
            buffers.clear()
        else:
            for chunk in chunks:
                checksum = zlib.crc32(chunk, checksum)
            head = _PICKLE.pack(b"p" if self.has_globals else b"v", checksum)
            # Mostly there is one chunk, and adding it is faster than joining.
            frame = head + chunks[0] if len(chunks) == 1 else b"".join((head, *chunks))
        self.has_globals = False
        chunks.clear()
        return frame


class _Unpickler(pickle.Unpickler):
    """Unpickles only plain values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GLOBALS:
            return _GLOBALS[module, name]
        check_pickle_allowed(f"{module}.{name}")
        raise pickle.UnpicklingError(f"{module}.{name} isn't a plain value")


# Creating a pickler takes as long as using it. `pop` and `append` of a list need no lock.
_idle: list[_Pickler] = []
_LARGEST_REUSED_BYTES = 1 << 14  # a pickler's memo table never shrinks


def _encode_int(value: int) -> bytes:
    try:
        return _INT.pack(b"i", value)
    except struct.error:
        # Python prints no int of more than 4300 digits, and a shorter one would fill the error.
        what = value if value.bit_length() < 200 else f"an int of {value.bit_length()} bits"
        raise PayloadError(f"{what} doesn't fit into 64 bits: send it in a list") from None


_WRITERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _encode_int,
    float: lambda value: _FLOAT.pack(b"d", value),
    str: lambda value: b"s" + value.encode("utf-8", "surrogatepass"),
    bytes: lambda value: b"b" + value,
}


def encode(value: object) -> bytes:
    """Encode any value."""
    if (writer := _WRITERS.get(type(value))) is not None:
        return writer(value)
    if is_exact(value):
        return b"".join((b"x", *tensors.taken_apart(value)))  # type: ignore[arg-type]
    try:
        pickler = _idle.pop()
    except IndexError:  # each is in use, by another thread or around this call
        pickler = _Pickler()
    try:  # a pickler that fails isn't reused
        pickler.dump(value)
    except _NotPlainError as error:
        part = error.args[0]
    except RecursionError as error:
        raise PayloadError(f"a {type(value).__qualname__} can't be pickled: {error}") from error
    else:
        frame = pickler.take()
        if len(frame) <= _LARGEST_REUSED_BYTES:
            pickler.clear_memo()
            _idle.append(pickler)
        return frame
    return _encode_object(value, part)


def _encode_object(value: object, part: object) -> bytes:
    check_pickle_allowed(f"a {type(part).__qualname__}")
    return _packed(b"o", importlib.import_module("unisono.payload.pickling").dump(value))


def _packed(tag: bytes, blocks: Sequence[bytes | memoryview]) -> bytes:
    pieces: list[bytes | memoryview] = [_PICKLE.pack(tag, zlib.crc32(blocks[0]))]
    for block in blocks:
        pieces += (_SIZE.pack(len(block)), block)
    return b"".join(pieces)


def header(tensor: Tensor) -> bytes:
    """Encode the header that peers need to receive `tensor`."""
    return b"h" + head_of(tensor).pack()


def failure(reason: str) -> bytes:
    """Encode the reason why this rank has no value to send."""
    return b"e" + reason.encode("utf-8", "replace")


def frame_or_reason(make: Callable[..., bytes], *args: Any) -> bytes:
    """Return `make`'s frame or, if it fails, one with the reason, to be raised on all ranks."""
    # Any exception counts: the user's own code is called, and if this rank raised here, the others
    # would wait for it.
    try:
        return make(*args)
    except Exception as error:  # a repr, a property, a __float__ may raise anything
        return failure(reason(error))


def reason(error: Exception) -> str:
    """Return the text of an exception, of any class, that encoding a value has raised."""
    try:
        text = str(error)
    except Exception:  # the exception's __str__ may raise, too
        text = ""
    return text if isinstance(error, PayloadError) else f"{type(error).__name__}: {text}"


_DAMAGED_PICKLE = "received a damaged frame: a pickle with a wrong checksum"
# Raised by unpickling and unpacking, not by a device that is out of memory.
_DAMAGE: tuple[type[Exception], ...] = (
    LookupError, TypeError, ValueError, EOFError, AttributeError, RecursionError, ImportError,
    struct.error, pickle.UnpicklingError,
)  # fmt: skip


def decode(blob: bytes, device: torch.device) -> Any:
    """Decode one frame."""
    return _decode_each((blob,), device)[0]


def _decode_each(frames: Sequence[bytes], device: torch.device) -> list[Any]:
    values: list[Any] = []
    try:
        for frame in frames:
            values.append(_READERS[frame[0]](frame, device))  # noqa: PERF401
    except PayloadError:  # it is a TypeError, too
        raise
    except _DAMAGE as error:
        raise PayloadError(f"received a damaged frame: {type(error).__name__}: {error}") from error
    return values


def decode_all(
    frames: Sequence[bytes], ranks: Callable[[], Sequence[int]], call: str, device: torch.device
) -> list[Any]:
    """Decode every rank's frame; raise the same error on all if some rank had no value to send."""
    for frame in frames:
        if frame[:1] == b"e":
            raise_failures(frames, ranks, call)
    return _decode_each(frames, device)


def _plain_of(blob: bytes, _: Any = None) -> Any:
    data = memoryview(blob)[_PICKLE.size :]
    if zlib.crc32(data) != _PICKLE.unpack_from(blob)[1]:
        raise PayloadError(_DAMAGED_PICKLE)
    return _Unpickler(io.BytesIO(data)).load() if _is_restricted() else pickle.loads(data)


def _blocks(blob: bytes) -> list[memoryview]:
    """Return the blocks of a frame of `_packed`."""
    data, end = memoryview(blob), _PICKLE.size
    blocks: list[memoryview] = []
    while end < len(data):
        start = end + _SIZE.size
        end = start + _SIZE.unpack_from(data, end)[0]
        blocks.append(data[start:end])
    if end != len(data):
        raise PayloadError("received a damaged frame: it ends too early")
    # Without any block, `decode` reports the IndexError as damage.
    if zlib.crc32(blocks[0]) != _PICKLE.unpack_from(blob)[1]:
        raise PayloadError(_DAMAGED_PICKLE)
    return blocks


@onto_device
def _buffered_of(blob: bytes) -> Any:
    first, *buffers = _blocks(blob)
    if _is_restricted():
        return _Unpickler(io.BytesIO(first), buffers=buffers).load()
    return pickle.loads(first, buffers=buffers)


def _object_of(blob: bytes, device: torch.device) -> Any:
    check_pickle_allowed("a received object")
    # As bytearrays, so that an array that was writable stays writable.
    copies = [bytearray(block) for block in _blocks(blob)]
    return importlib.import_module("unisono.payload.pickling").load(copies, device)


def _header_of(blob: bytes, _: torch.device) -> TensorHeader:
    head, end = TensorHeader.unpack(blob, 1)
    if end != len(blob):
        raise PayloadError(f"received a damaged frame: it has {len(blob)} bytes instead of {end}")
    return head


@onto_device
def _tensor_of(blob: bytes) -> Tensor:
    head, start = TensorHeader.unpack(blob, 1)
    return head.tensor(memoryview(blob)[start:])


def _failure_of(blob: bytes, _: torch.device) -> NoReturn:
    raise PayloadError(str(memoryview(blob)[1:], "utf-8", "replace"))


def _constant(value: Any) -> Callable[[bytes, Any], Any]:
    """Return the reader of a frame that is only its tag."""

    def read(blob: bytes, _: Any) -> Any:
        if len(blob) != 1:  # the tag is the whole frame
            raise PayloadError("received a damaged frame: bytes are left over")
        return value

    return read


_READERS: dict[int, Callable[[bytes, torch.device], Any]] = {
    ord("N"): _constant(None),
    ord("T"): _constant(True),
    ord("F"): _constant(False),
    ord("i"): lambda blob, _: _INT.unpack(blob)[1],
    ord("d"): lambda blob, _: _FLOAT.unpack(blob)[1],
    ord("s"): lambda blob, _: str(memoryview(blob)[1:], "utf-8", "surrogatepass"),
    ord("b"): lambda blob, _: bytes(memoryview(blob)[1:]),
    ord("v"): _plain_of,
    ord("p"): onto_device(_plain_of),
    ord("q"): _buffered_of,
    ord("o"): _object_of,
    ord("h"): _header_of,
    ord("x"): _tensor_of,
    ord("e"): _failure_of,
}


def raise_failures(frames: Sequence[bytes], ranks: Callable[[], Sequence[int]], call: str) -> None:
    """Raise the same error on every rank if some rank had no value to send."""
    for first in frames:  # faster than any()
        if first[:1] == b"e":
            break
    else:
        return
    reasons = [
        f"rank {rank}: {bytes(frame[1:]).decode('utf-8', 'replace')}"
        for rank, frame in zip(ranks(), frames, strict=True)
        if frame[:1] == b"e"
    ]
    raise PayloadError(f"{call} got a value that can't be sent ({'; '.join(reasons)})")
