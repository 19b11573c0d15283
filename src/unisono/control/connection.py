"""Messages between two ranks over a stream socket, with a mailbox beside it on one host.

    message    kind B   sequence number Q   length of the body Q   body
    body       of GIVE and ALL: the size of each blob Q..., then the blobs, both in the order of
               positions, which both ends know; of all other kinds: JSON or text

All integers are little-endian. In a mailbox, kind and sequence number are the stamp, and the length
is the word after it. A blob over the group's inline limit is cut: the body holds its whole size but
only its first bytes, and the ranks then move it on the data plane. `signatures` defines the format
of a blob. A body over the connection's limit ends the connection, so a peer can't make this process
allocate more than that.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.host.mailbox import MAILBOX_BYTES, Mailbox

GIVE, ALL, FAIL, NOTICE, ASK, ANSWER, LATE, LEAVE, WAKE = range(9)
START_BYTES = 256
"""Bytes of a long blob that are in the body: enough to identify its call."""
COPIED_BYTES = 1 << 14
"""Longer parts of a body are passed as views, shorter ones as copies."""
_CHUNK = 1 << 16
_LOOK_S = 0.3  # between looks of a rank that can't send for a failure
_HEADER = struct.Struct("<BQQ")
Frame = tuple[int, int, bytes]
"""Kind, sequence number and body."""
Blobs = tuple[list[bytes], Sequence[int]]
"""Blobs by position, and their whole sizes; a long blob is cut to its start."""


def split_blobs(body: bytes, head: struct.Struct, inline_bytes: int) -> Blobs:
    """Parse the body of a round's message, whose sizes are in `head`."""
    end = head.size
    if len(body) < end:
        raise ValueError(f"it sent {len(body)} bytes for the blobs of {end // 8} ranks")
    sizes = head.unpack_from(body)
    view: Any = body if len(body) < COPIED_BYTES else memoryview(body)
    blobs: list[bytes] = []
    for size in sizes:
        start = end
        end += size if size <= inline_bytes else min(size, START_BYTES)  # a longer one was cut
        blobs.append((body if end - start < COPIED_BYTES else view)[start:end])
    if end != len(body):
        raise ValueError(f"it sent {len(body)} bytes for blobs of {sizes} bytes")
    return blobs, sizes


class ConnectionClosed(Exception):
    """The peer is gone or sent an invalid frame. Never leaves this package."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The content of a FAIL frame."""

    kind: str
    text: str
    rank: int = -1

    def encode(self) -> bytes:
        """Return the body of the frame."""
        return json.dumps(asdict(self)).encode()


def read_failure(body: bytes) -> FailureReport:
    """Parse the body of a FAIL frame."""
    try:
        fields = json.loads(body)
        return FailureReport(str(fields["kind"]), str(fields["text"]), int(fields.get("rank", -1)))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ConnectionClosed("it sent an invalid report of a failure") from None


class Connection:
    """One connection to one rank."""

    def __init__(self, sock: socket.socket, mailbox: Mailbox | None, limit_bytes: int) -> None:
        sock.setblocking(False)
        self.mailbox: Mailbox | None = mailbox
        """Carries messages of rounds that fit into it; None if there is only the socket."""
        self.beside: Sequence[Connection] = ()
        """Connections to read while this one sends, as their ranks send at the same time: if none
        read meanwhile, each would wait for another."""
        self.is_failed: Callable[[], bool] = bool
        """Whether nothing but reports of a failure is worth sending any more."""
        self._last_kind = LEAVE if mailbox is None else WAKE  # WAKE is valid only with a mailbox
        self._sock = sock
        self._limit = limit_bytes
        self._held = bytearray()  # read, but not yet taken
        self._is_within_frame = False  # a frame was begun, and perhaps not finished
        self.fd: int = sock.fileno()

    def send(self, kind: int, seq: int, body: bytes, until: float) -> None:
        """Send one frame over the socket."""
        if self._is_within_frame:  # what follows half a frame can't be read
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            raise ConnectionClosed("this rank has sent only a part of a message")
        self._is_within_frame = True
        data = memoryview(_HEADER.pack(kind, seq, len(body)) + body)
        data = data[self._send_part(data) :]
        while data:
            left = until - time.monotonic()
            if left <= 0 or (self.is_failed() and kind != FAIL):
                raise TimeoutError
            self._until_writable(min(left, _LOOK_S))
            data = data[self._send_part(data) :]
        self._is_within_frame = False

    def finish(self, kind: int, seq: int, body: bytes, until: float) -> None:
        """Send what is left of a round's frame where putting it into a mailbox wasn't enough."""
        if self.mailbox is None or len(body) > MAILBOX_BYTES:
            self.send(kind, seq, body, until)
            return
        # The mailbox has it. If the peer can't be woken, it has read the frame and exited.
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            self.send(WAKE, 0, b"", until)

    def _until_writable(self, wait_s: float) -> None:
        """Wait until the socket takes more bytes, the time is over, or there is more to read."""
        waits = select.poll()
        waits.register(self.fd, select.POLLOUT)
        for each in self.beside:
            if not each.is_closed():  # reads ahead
                both = select.POLLIN | select.POLLOUT
                waits.register(each.fd, both if each is self else select.POLLIN)
        waits.poll(wait_s * 1000)

    def _send_part(self, data: memoryview) -> int:
        """Send the bytes that the socket takes at once; return their number."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionClosed(str(error)) from None

    def take(self) -> Frame | None:
        """Return the next frame that has arrived, or None; never waits."""
        while True:
            mailbox = self.mailbox
            frame = None if mailbox is None else mailbox.take()
            if frame is None:
                frame = self._parse()
            if frame is not None and frame[0] != WAKE:  # WAKE: look into the mailbox again
                return frame
            if frame is None and not self._fill():
                return None

    def _fill(self) -> bool:
        """Read from the socket; return whether there may be a new frame."""
        how = "it closed the connection"
        try:
            data = self._sock.recv(max(_CHUNK, self._missing_bytes()))
        except BlockingIOError:
            return False
        except OSError as error:
            data, how = b"", str(error)
        self._held += data
        # The last frame of a peer that is gone may still be in the mailbox.
        if not data and not (self.mailbox is not None and self.mailbox.has_frame()):
            raise ConnectionClosed(how)
        return True

    def is_closed(self) -> bool:
        """Return whether the peer is gone, after reading ahead; never waits."""
        try:
            while len(self._held) <= self._limit:  # the rest is read once a frame is taken
                data = self._sock.recv(_CHUNK)
                if not data:
                    return True
                self._held += data
        except BlockingIOError:
            return False
        except OSError:
            return True
        return False

    def sleep(self, is_asleep: bool) -> None:
        """Set whether the next frame must wake this rank."""
        if self.mailbox is not None:
            self.mailbox.sleep(is_asleep)

    def _missing_bytes(self) -> int:
        """Return how many bytes the first frame still lacks; 0 if unknown."""
        if len(self._held) < _HEADER.size:
            return 0
        return int(_HEADER.unpack_from(self._held)[2]) + _HEADER.size - len(self._held)

    def _parse(self) -> Frame | None:
        """Remove and return the first frame of the bytes held; None if it isn't complete."""
        held = self._held
        if len(held) < _HEADER.size:
            return None
        kind, seq, size = _HEADER.unpack_from(held)
        # Before the body has arrived, so that no peer makes this rank hold more than the limit.
        if size > self._limit or kind > self._last_kind:
            raise ConnectionClosed(f"it sent a frame of kind {kind} with {size} bytes")
        end = _HEADER.size + size
        if len(held) < end:
            return None
        body = bytes(memoryview(held)[_HEADER.size : end])
        del held[:end]
        return kind, seq, body

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        self.mailbox = None  # unmapped with its last view
