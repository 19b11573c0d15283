"""Framed messages between two ranks over a stream socket, with a lane beside it on one host.

A frame: kind as one byte, sequence number and length of the body as uint64, all little-endian,
then the body. A body over the line's limit ends the line, so a peer can't make this process
allocate more than that.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from typing import Any

from unisono.host.mailbox import LANE_BYTES, Mailbox

__all__ = (
    "ALL",
    "ANSWER",
    "ASK",
    "COPIED_BYTES",
    "FAIL",
    "GIVE",
    "LATE",
    "LEAVE",
    "NOTICE",
    "WAKE",
    "Connection",
    "ConnectionClosed",
    "entry",
    "read_entries",
    "read_failure",
)

GIVE, ALL, FAIL, NOTICE, ASK, ANSWER, LATE, LEAVE, WAKE = range(9)
_HEAD = struct.Struct("<BQQ")
_ENTRY = struct.Struct("<IQ")
_CHUNK = 1 << 16
_LONGEST_WAIT_S = 3600.0  # `poll` takes no infinity
COPIED_BYTES = 1 << 14
"""What is longer is only viewed, where a part of it would do."""


class ConnectionClosed(Exception):
    """The peer is gone, or sent what isn't a frame. Never leaves this package."""


def read_failure(body: bytes) -> dict[str, object]:
    """Read what a FAIL frame says: ``kind``, ``text``, and ``rank`` where a rank is gone.

    Local.

    Raises:
        LineClosed: it is none.
    """
    try:
        said = json.loads(body)
        rank = int(said.get("rank", -1))
        return {"kind": str(said["kind"]), "text": str(said["text"]), "rank": rank}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ConnectionClosed("it sent a report of a failure that can't be read") from None


def entry(place: int, blob: bytes, tail: bytes = b"") -> bytes:
    """Make an entry of a bundle: place as uint32, length as uint64, blob and tail. Local."""
    return b"".join((_ENTRY.pack(place, len(blob) + len(tail)), blob, tail))


def read_entries(bundle: bytes) -> dict[int, bytes]:
    """Take a bundle of entries apart, by place.

    Local.

    Returns:
        What each has, as bytes; one that is long as a view of `bundle`.

    Raises:
        LineClosed: it is none.
    """
    blobs: dict[int, bytes] = {}
    at, end = 0, len(bundle)
    view: Any = memoryview(bundle)
    while at < end:
        if end - at < _ENTRY.size:
            raise ConnectionClosed("it sent half an entry")
        place, size = _ENTRY.unpack_from(bundle, at)
        at += _ENTRY.size + size
        if at > end:
            raise ConnectionClosed(f"it sent an entry that says it has {size} bytes")
        blobs[place] = (bundle if size < COPIED_BYTES else view)[at - size : at]
    return blobs


class Connection:
    """One connection to one rank.

    Args:
        sock: connected stream socket; the line owns it.
        lane: memory that both ends share, if any; rounds go through it as far as they fit.
        limit_bytes: longest body that the peer may send.
    """

    def __init__(self, sock: socket.socket, lane: Mailbox | None, limit_bytes: int) -> None:
        sock.setblocking(False)
        self._lane = lane
        self.has_lane: bool = lane is not None
        self._last_kind = WAKE if self.has_lane else LEAVE
        self._sock = sock
        self._limit = limit_bytes
        self._held = bytearray()
        self._is_within = False  # a frame that was begun, and may not have been ended
        self.fd: int = sock.fileno()

    def send(self, kind: int, seq: int, body: bytes, until: float) -> None:
        """Send one frame.

        Local.

        Args:
            kind: one of the kinds of this module.
            seq: number of the round.
            body: any bytes.
            until: when to give up, by ``time.monotonic()``.

        Raises:
            LineClosed: the peer is gone.
            TimeoutError: it doesn't read.
        """
        lane = self._lane
        if lane is not None and kind <= ALL and len(body) <= LANE_BYTES:
            if lane.put(kind, seq, body):
                with contextlib.suppress(
                    ConnectionClosed, TimeoutError
                ):  # it took the frame and left
                    self._transmit(WAKE, 0, b"", until)
            return
        self._transmit(kind, seq, body, until)

    def _transmit(self, kind: int, seq: int, body: bytes, until: float) -> None:
        if self._is_within:  # what follows half a frame can't be read
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            raise ConnectionClosed("this rank left a message half-way")
        data = memoryview(_HEAD.pack(kind, seq, len(body)) + body)
        self._is_within = True
        data = data[self._put(data) :]
        while data:
            writable = select.poll()
            writable.register(self.fd, select.POLLOUT)
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            writable.poll(min(left, _LONGEST_WAIT_S) * 1000)
            data = data[self._put(data) :]
        self._is_within = False

    def _put(self, data: memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionClosed(str(error)) from None

    def take(self) -> tuple[int, int, bytes] | None:
        """Take what has come.

        Local; never waits.

        Returns:
            Kind, sequence number and body; None if no whole frame is there yet.

        Raises:
            LineClosed: the peer is gone and all that it sent has been taken, or it sent nonsense.
        """
        while True:
            lane = self._lane
            frame = None if lane is None else lane.take()
            if frame is None:
                frame = self._parse()
            if frame is not None and frame[0] != WAKE:
                return frame
            if frame is None and not self._fill():
                return None

    def _fill(self) -> bool:
        """Read what the socket has; tell whether there was something to be looked at."""
        how = "it closed the connection"
        try:
            data = self._sock.recv(max(_CHUNK, self._missing()))
        except BlockingIOError:
            return False
        except OSError as error:
            data, how = b"", str(error)
        self._held += data
        if not data and not self.may_hold(False):
            raise ConnectionClosed(how)
        return True

    def may_hold(self, otherwise: bool = True) -> bool:
        """Tell whether a frame waits in the lane; `otherwise` where there is none. Local."""
        lane = self._lane
        return otherwise if lane is None else lane.has_come

    def is_closed(self) -> bool:
        """Tell whether the peer is gone, reading ahead what it sent. Local; never waits."""
        try:
            while len(self._held) <= self._limit:
                data = self._sock.recv(_CHUNK)
                if not data:
                    return True
                self._held += data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    def sleep(self, does_sleep: bool) -> None:
        """Say whether the next frame must wake this rank. Local."""
        lane = self._lane
        if lane is not None:
            lane.sleep(does_sleep)

    def _missing(self) -> int:
        if len(self._held) < _HEAD.size:
            return 0
        return int(_HEAD.unpack_from(self._held)[2]) + _HEAD.size - len(self._held)

    def _parse(self) -> tuple[int, int, bytes] | None:
        held = self._held
        if len(held) < _HEAD.size:
            return None
        kind, seq, size = _HEAD.unpack_from(held)
        if size > self._limit or kind > self._last_kind:
            raise ConnectionClosed(f"it sent a frame of kind {kind} with {size} bytes")
        end = _HEAD.size + size
        if len(held) < end:
            return None
        body = bytes(memoryview(held)[_HEAD.size : end])
        del held[:end]
        return kind, seq, body

    def close(self) -> None:
        """Close the connection. Local."""
        self._sock.close()
        self._lane = None  # with it goes the memory, once nobody looks at it
