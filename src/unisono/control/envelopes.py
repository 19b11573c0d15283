"""Wire formats of a round: messages, blobs, and their parsers.

    message    kind B   sequence number Q   length of the body Q   body
    body       of GIVE and ALL: the size of each blob Q..., then the blobs, both in the order of
               places, which both ends know; of all other kinds: JSON or text
    blob       magic 2s   length of the call H   length of the site H   call   site   value

All integers are little-endian. In a mailbox of shared memory, kind and sequence number are the
stamp, and the length is the word after it. Of a blob over the group's inline limit, the body holds
only the first bytes, beside the whole size: the ranks then move it on the data plane. Calls are
compared between ranks; sites, the lines of the calls, are for messages. `payload.codec` encodes
the value.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

HEADER = struct.Struct("<BQQ")
START_BYTES = 256
"""Bytes of a long blob that are in the body: enough to identify its call."""
COPIED_BYTES = 1 << 14
"""Longer parts are views instead of copies."""
Blobs = tuple[Sequence[bytes], Sequence[int]]
"""Blobs by place, and their sizes; of a long one only the start."""

_SIZE_BYTES = 8
_CALL = struct.Struct("<2sHH")
_MAGIC = b"\xf5C"
_LONGEST_CALL = 1000  # bytes; the rest of a longer one is compared by its hash


def join_blobs(blobs: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """Return the body of a round's message."""
    return b"".join((struct.pack(f"<{len(sizes)}Q", *sizes), *blobs))


def split_blobs(body: bytes, count: int, inline_bytes: int) -> Blobs:
    """Parse the body of a round's message."""
    at = count * _SIZE_BYTES
    if len(body) < at:
        raise ValueError(f"it sent {len(body)} bytes for the blobs of {count} ranks")
    sizes = struct.unpack_from(f"<{count}Q", body)
    view: Any = memoryview(body)
    blobs: list[bytes] = []
    for size in sizes:
        start = at
        at += size if size <= inline_bytes else min(size, START_BYTES)
        blobs.append((body if at - start < COPIED_BYTES else view)[start:at])
    if at != len(body):
        raise ValueError(f"it sent {len(body)} bytes for blobs of {sizes} bytes")
    return blobs, sizes


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
