"""Signatures of calls: name, line and sequence number of each rank's calls.

Ranks may make the same call on different lines, so one difference of lines proves nothing. But
suppose that one rank's line differs in a round. If in the next round this rank is on the line that
the others have just left, or the others are on its previous line, it has made one call more or one
less than they have. If both hold, two calls were swapped, which only causes a warning.

    blob   magic 2s   length of the call H   length of the site H   call   site   value

Integers are little-endian. Calls are compared between ranks; sites, the lines of the calls, are for
messages. `payload.codec` encodes the value.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, ContextVar, copy_context
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from unisono.control.connection import COPIED_BYTES
from unisono.errors import CollectiveMismatchError
from unisono.topology import EVERYBODY, Group, ranks_by_value
from unisono.tracebacks import place_of

_log = logging.getLogger(__name__)
_CALL = struct.Struct("<2sHH")
_MAGIC = b"\xf5C"
_LONGEST_CALL = 1000  # bytes; the rest of a longer one is compared by its hash


@lru_cache(maxsize=256)
def call_head(call: str, site: bytes) -> bytes:
    """Return the header before the value in a call's blob."""
    text = call.encode("utf-8", "backslashreplace")
    if len(text) > _LONGEST_CALL:
        text = text[:_LONGEST_CALL] + hashlib.sha256(text).hexdigest().encode()
    return _CALL.pack(_MAGIC, len(text), len(site)) + text + site


def read_call(blob: bytes) -> tuple[bytes, bytes, int] | None:
    """Return a blob's call, site and offset of the value; None if it has no call."""
    if len(blob) < _CALL.size or blob[:2] != _MAGIC:
        return None
    _, width, site_width = _CALL.unpack_from(blob)
    end = _CALL.size + width
    start = end + site_width
    return blob[_CALL.size : end], blob[end:start], start


class CallHistory:
    """The lines of a group's last round, if they differed between its ranks."""

    def __init__(self) -> None:
        self.sites: list[str] | None = None
        """Lines of the last round by position; empty if they also differed in the round before,
        None if they agreed."""
        self._swaps: set[frozenset[str]] = set()  # pairs of lines already warned of

    def compare(self, sites: list[str], call: str, ranks: Sequence[int]) -> None:
        """Record a round whose lines differ; raise if one rank is a call ahead or behind."""
        before, self.sites = self.sites, sites if self.sites is None else []
        if not before:  # the lines of the round before agreed, or were compared already
            return
        lines = [*zip(before, sites, strict=True)]
        for position, (old, new) in enumerate(lines):
            others = {pair for other, pair in enumerate(lines) if other != position}
            if len(others) > 1:  # the other ranks don't agree
                continue
            their_old, their_new = others.pop()
            is_behind, is_ahead = new == their_old, their_new == old
            if is_behind and is_ahead:  # a swap: the rank has made as many calls as the others
                self._warn_of_swap(ranks[position], call, old, new)
                return
            if is_behind or is_ahead:
                raise _shift_error(
                    ranks[position], is_behind, call, (old, new), (their_old, their_new)
                )

    def _warn_of_swap(self, rank: int, call: str, one: str, other: str) -> None:
        if frozenset((one, other)) not in self._swaps:
            self._swaps.add(frozenset((one, other)))
            _log.warning(
                "rank %d called %s at %s and then at %s, the other ranks in the opposite order: "
                "values were combined in the order of the calls",
                rank,
                call,
                one,
                other,
            )


def _shift_error(
    rank: int, is_behind: bool, call: str, own: tuple[str, str], others: tuple[str, str]
) -> CollectiveMismatchError:
    """Return the error for a rank and the others, each with the lines of their last two rounds."""
    extra, count = (own[0], "more") if is_behind else (others[0], "less")
    return CollectiveMismatchError(
        f"rank {rank} has made one call {count} than the others, probably at {extra}, so the ranks "
        f"received values of different calls:\n"
        f"  rank {rank}: {call} at {own[0]}, then at {own[1]}\n"
        f"  others: {call} at {others[0]}, then at {others[1]}\n"
        "make every rank of the group call the same collectives in the same order; if this is "
        "intended, set UNISONO_DEBUG=0"
    )


UNKNOWN = "an internal call"
"""Result of `describe` for blobs without a call."""
_LONGEST_SITE = 60  # bytes; leaves space for the call and a short value in a frame of `fallback`
OUR_FRAMES = (
    str(Path(__file__).parents[1]),
    contextlib.__file__,
    f"{Path(torch.__file__).parent}{os.sep}",
)
"""Prefixes of files whose frames aren't the user's: ours, torch's, and contextlib's around our
sections."""
_STARTED = "<string>"  # the file of the first frame of a process that we started


# The user's line for which a background thread runs a call; that thread's frames lack the line.
_carried: ContextVar[bytes] = ContextVar("_carried", default=b"")
_purpose: ContextVar[str] = ContextVar("_purpose", default="")


class _Line(threading.local):
    known: bytes = b""
    """Line of this thread's current call; empty until it is looked up."""


line: _Line = _Line()


@contextlib.contextmanager
def called(purpose: str) -> Iterator[None]:
    """Set a purpose: it replaces the names of calls in the block, and of those they start."""
    token = _purpose.set(purpose)
    try:
        yield
    finally:
        _purpose.reset(token)


def purpose_or(call: str) -> str:
    """Return the purpose that `called` has set; `call` without one."""
    return _purpose.get() or call


def from_here() -> Context:
    """Return a context for a call in another thread, in which `site` returns the current line."""
    context = copy_context()
    context.run(_carried.set, site())
    return context


def carried_line() -> str:
    """Return the line for which this thread runs a call of another thread; empty if none."""
    return _carried.get().decode("utf-8", "replace")


def site() -> bytes:
    """Return file and line of the user's innermost frame."""
    # That of a logged call, `CallLog` has found; a background thread's frames lack the line.
    known = line.known or _carried.get()
    if known:
        return known
    frame = sys._getframe(level() - 1)  # `level` counts from 1, `_getframe` from 0
    return encode_site(frame.f_code.co_filename, frame.f_lineno)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's innermost frame; None if all are ours."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not (file.startswith(OUR_FRAMES) or file == _STARTED):
            return frame
        frame = frame.f_back
    return None


def line_of_call() -> str:
    """Return file and line of the user's innermost frame, for messages."""
    frame = sys._getframe(level() - 1)
    return place_of(frame.f_code.co_filename, frame.f_lineno)


def level() -> int:
    """Return the ``stacklevel`` of a warning that should point to the line that `site` returns."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OUR_FRAMES):
        frame, depth = frame.f_back, depth + 1
    return depth


@lru_cache(maxsize=1024)
def encode_site(file: str, line: int) -> bytes:
    """Return a file and line in the form of `site`."""
    return f"{file}:{line}".encode("utf-8", "backslashreplace")[-_LONGEST_SITE:]


def unpack(
    blobs: Sequence[bytes],
    head: bytes,
    ranks: Callable[[], Sequence[int]],
    history: CallHistory | None = None,
) -> list[bytes]:
    """Return the values of blobs; raise if the ranks' calls differ."""
    start = len(head)
    values, is_aligned = [], True
    for blob in blobs:
        whole: Any = blob if len(blob) < COPIED_BYTES else memoryview(blob)
        if blob[:start] == head:
            values.append(whole[start:])
            continue
        own, other = read_call(head), read_call(blob)
        if own is None or other is None or other[0] != own[0]:
            raise _mismatch(blobs, ranks())
        values.append(whole[other[2] :])
        is_aligned = False  # the same call, at another line
    if history is not None:
        if is_aligned:
            history.sites = None
        else:
            sites = [_decode_call(blob)[1] for blob in blobs]
            history.compare(sites, call_of(head), ranks())
    return values


def describe(blob: bytes) -> str:
    """Return a blob's call and its line, for messages."""
    if read_call(blob) is None:
        return UNKNOWN
    call, site = _decode_call(blob)
    return f"{call} at {_place_of_site(site)}"


def _place_of_site(site: str) -> str:
    """Return a site for messages; complete a shortened one from the working directory."""
    file, _, number = site.rpartition(":")
    if not number.isdecimal():
        return site
    if len(site.encode()) == _LONGEST_SITE:
        parts = file.split(os.sep)
        try:
            here = os.path.realpath(".")
        except OSError:  # the folder is gone
            here = ""
        # The shortest relative path that the working directory completes to the shortened site.
        ends = (os.sep.join(parts[-count:]) for count in range(1, len(parts)))
        file = next((end for end in ends if f"{here}{os.sep}{end}".endswith(file)), f"...{file}")
    return place_of(file, int(number))


def call_of(blob: bytes) -> str:
    """Return a blob's call; empty if it isn't one of the user's."""
    return _decode_call(blob)[0]


def _decode_call(blob: bytes) -> tuple[str, str]:
    """Return a blob's call and its site; both are empty if it has none."""
    parts = read_call(blob)
    if parts is None:
        return "", ""
    return str(parts[0], "utf-8", "replace"), str(parts[1], "utf-8", "replace")


def _mismatch(blobs: Sequence[bytes], ranks: Sequence[int]) -> CollectiveMismatchError:
    """Return the error that lists each rank's call, the odd one out first."""
    calls = {rank: describe(blob) for rank, blob in zip(ranks, blobs, strict=True)}
    names = dict(zip(ranks, map(call_of, blobs), strict=True))  # without lines, which may differ
    ranks_of = ranks_by_value(names)
    odd = [alike[0] for alike in ranks_of.values() if len(alike) == 1]
    is_alone = len(odd) == 1 and len(ranks_of) == 2
    one = odd[0] if is_alone else ranks[0]
    # Damaged calls may have equal names: they differ in bytes that can't be decoded.
    other = next((rank for rank, name in names.items() if name != names[one]), ranks[-1])
    others = "the others" if is_alone else f"rank {other}"
    lines = "\n".join(f"  rank {rank}: {call}" for rank, call in calls.items())
    return CollectiveMismatchError(
        f"rank {one} called {calls[one]}, {others} {calls[other]}:\n{lines}\n"
        "make every rank of the group call the same collectives in the same order"
    )


class SequenceNumbers:
    """Counts and last calls of each group, by the group's name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Number of operations on the data plane that this rank began: an operation has the same
        number on all ranks."""
        self.last: str = ""
        """The last operation and its line; empty after a round of the control plane."""
        self.histories: dict[str, CallHistory | None] = {}
        """The lines of rounds in which the ranks compared calls; None if they don't."""
        self._models: dict[str, int] = {}  # modules so far, by group

    def count_model(self, group: Group | None) -> int:
        """Return the number of a group's next trained module, from 1; the same on all ranks."""
        key = EVERYBODY if group is None else group.name
        self._models[key] = number = self._models.get(key, 0) + 1
        return number

    def forget(self, group: str) -> None:
        """Remove the records of a group."""
        for kept in (self.counts, self.histories, self._models):
            kept.pop(group, None)

    def begin(self, group: str, call: str) -> int:
        """Record an operation that this rank begins; return its number."""
        self.counts[group] = count = self.counts.get(group, 0) + 1
        self.last = f"{call} at {site().decode('utf-8', 'replace')}"
        return count
