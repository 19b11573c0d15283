"""What a rank says of its call, so that ranks that call different things learn it at once.

A frame: 2 bytes of magic, the lengths of call and site as uint16 little-endian, the call, the site,
then the blob. Calls are compared between ranks; sites are for people.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
from collections.abc import Sequence
from contextvars import Context, ContextVar, copy_context
from functools import lru_cache
from pathlib import Path
from typing import Any

from unisono._tracebacks import hides, place_of
from unisono.control.history import History
from unisono.control.wire import COPIED_BYTES
from unisono.errors import CollectiveMismatchError

__all__ = (
    "UNKNOWN",
    "describe",
    "from_here",
    "level",
    "line_of_call",
    "name",
    "pack",
    "site",
    "unpack",
)

__tracebackhide__ = hides

UNKNOWN = "a call of the library's own"
"""What `describe` says of a frame that isn't one."""
_MAGIC = b"\xf5C"
_HEAD = struct.Struct("<2sHH")
_LONGEST_SITE = (
    60  # bytes; with its call a short value still fits into the derived exchange's frame
)
_LONGEST_CALL = 1000  # bytes; the rest of a longer one is compared by its hash
_PASSED = (str(Path(__file__).parents[1]), contextlib.__file__)  # who enters and leaves sections


# The line of the call that a background thread carries: its own frames say nothing of it.
_carried: ContextVar[bytes] = ContextVar("_carried", default=b"")


def from_here() -> Context:
    """Give the context to run a call in elsewhere: there, `site` gives the line of here. Local."""
    context = copy_context()
    context.run(_carried.set, site())
    return context


def site() -> bytes:
    """Give file and line of the innermost frame that isn't ours. Local."""
    carried = _carried.get()
    if carried:
        return carried
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back
    return _named(frame.f_code.co_filename, frame.f_lineno)


def line_of_call() -> str:
    """Give file and line of the innermost frame that isn't ours, for a person. Local."""
    frame = sys._getframe(level() - 1)
    return place_of(frame.f_code.co_filename, frame.f_lineno)


def level() -> int:
    """Give the ``stacklevel`` of a warning here that names the line `site` would give. Local."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame, depth = frame.f_back, depth + 1
    return depth


@lru_cache(maxsize=1024)
def _named(file: str, line: int) -> bytes:
    return f"{file}:{line}".encode()[-_LONGEST_SITE:]


def pack(call: str, blob: bytes) -> bytes:
    """Put the call and the line that it was made on before a blob.

    Local.

    Args:
        call: the operation with all that must agree between ranks: ``"broadcast from 0"``.
        blob: any bytes.

    Returns:
        A frame for an exchange.
    """
    text, place = call.encode(), site()
    if len(text) > _LONGEST_CALL:
        text = text[:_LONGEST_CALL] + hashlib.sha256(text).hexdigest().encode()
    return b"".join((_HEAD.pack(_MAGIC, len(text), len(place)), text, place, blob))


def unpack(
    frames: Sequence[bytes], ranks: Sequence[int], history: History | None = None
) -> list[bytes]:
    """Take the blobs out of frames, if all ranks made the same call.

    Local.

    Args:
        frames: one for each rank, in order of ranks; bytes of any kind.
        ranks: their global ranks.
        history: what the lines of the rounds before were.

    Returns:
        The blobs, in the same order; long ones are views.

    Raises:
        CollectiveMismatchError: the calls differ; says what each rank called, and where. Or one
            rank is a call behind the others.
    """
    first = frames[0]
    if len(first) < _HEAD.size or first[:2] != _MAGIC:
        raise _mismatch(frames, ranks)
    _, width, room = _HEAD.unpack_from(first)
    start, end = _HEAD.size, _HEAD.size + width
    call, body = first[start:end], end + room
    head = first[:body]  # mostly the same everywhere
    blobs, is_aligned = [], True
    for frame in frames:
        whole: Any = frame if len(frame) < COPIED_BYTES else memoryview(frame)
        if frame[:body] == head:
            blobs.append(whole[body:])
            continue
        if len(frame) < _HEAD.size:
            raise _mismatch(frames, ranks)
        magic, width, room = _HEAD.unpack_from(frame)
        if magic != _MAGIC or frame[start : start + width] != call:
            raise _mismatch(frames, ranks)
        blobs.append(whole[start + width + room :])
        is_aligned = False
    if history is not None:
        if is_aligned:
            history.sites = None
        else:
            history.compare([_split(frame)[1] for frame in frames], call.decode(), ranks)
    return blobs


def describe(frame: bytes) -> str:
    """Say what a frame is of, and the line of it, for a person. Local."""
    if len(frame) < _HEAD.size or frame[:2] != _MAGIC:
        return UNKNOWN
    call, line = _split(frame)
    return f"{call} at {_short(line)}"


def _short(line: str) -> str:
    """Write a line as people do; one that was cut is as long as `site` gave it."""
    file, _, number = line.rpartition(":")
    if not number.isdecimal():
        return line
    if len(line.encode()) == _LONGEST_SITE:
        parts = file.split(os.sep)
        try:
            here = os.path.realpath(".")
        except OSError:  # the folder is gone
            here = ""
        ends = (os.sep.join(parts[-count:]) for count in range(1, len(parts)))
        file = next((end for end in ends if f"{here}{os.sep}{end}".endswith(file)), f"...{file}")
    return place_of(file, int(number))


def name(frame: bytes) -> str:
    """Say what a frame is of; empty where it is of none of the user's calls. Local."""
    return "" if describe(frame) == UNKNOWN else _split(frame)[0]


def _split(frame: bytes) -> tuple[str, str]:
    """Give the call and the line of it."""
    _, width, room = _HEAD.unpack_from(frame)
    end = _HEAD.size + width
    parts = bytes(frame[_HEAD.size : end]), bytes(frame[end : end + room])
    return parts[0].decode("utf-8", "replace"), parts[1].decode("utf-8", "replace")


def _mismatch(frames: Sequence[bytes], ranks: Sequence[int]) -> CollectiveMismatchError:
    """Say who called what; first the one that called something else than all others, if one did."""
    said = {rank: describe(frame) for rank, frame in zip(ranks, frames, strict=True)}
    kinds = [name(frame) for frame in frames]
    odd = [rank for rank, kind in zip(ranks, kinds, strict=True) if kinds.count(kind) == 1]
    head = "the ranks called different things at the same time:"
    if len(odd) == 1 and len(set(kinds)) == 2:
        other = next(rank for rank in ranks if rank != odd[0])
        head = f"rank {odd[0]} called {said[odd[0]]}, the others {said[other]}:"
    lines = "\n".join(f"  rank {rank}: {call}" for rank, call in said.items())
    return CollectiveMismatchError(
        f"{head}\n{lines}\nmake every rank of the group call the same collectives in the same order"
    )
