"""Messages between the parent and one worker: <Q length, one byte of kind, then the body."""

from __future__ import annotations

import queue
import socket
import struct
from contextvars import ContextVar
from dataclasses import dataclass

TASK, RESULT, ERROR, DONE, END = b"t", b"r", b"e", b"d", b"q"
_HEAD = struct.Struct("<Qc")


@dataclass(frozen=True, slots=True)
class OwnChannel:
    """A worker's end of its channel, for further tasks and their answers."""

    socket: socket.socket
    tasks: queue.SimpleQueue[bytes] | None = None
    """Queue of tasks, if another thread reads the channel; else None."""

    def next_task(self) -> bytes | None:
        """Wait for the next task; empty for the end, None once the parent has ended."""
        if self.tasks is not None:
            return self.tasks.get()
        message = receive(self.socket)
        return None if message is None else message[1]


OWN: ContextVar[OwnChannel] = ContextVar("OWN")


def send(channel: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """Send one message."""
    channel.sendall(head(kind, len(body)))
    channel.sendall(body)


def task(body: bytes) -> memoryview:
    """Build the message of a task, for sending it in parts."""
    return memoryview(head(TASK, len(body)) + body)


def head(kind: bytes, size: int = 0) -> bytes:
    """Build the header of a body of `size` bytes."""
    return _HEAD.pack(size, kind)


class Inbox:
    """Reader of one channel's messages that never waits for their ends."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._is_torn = False  # while reading, and after Ctrl-C then: the position is unknown
        self._expect(None, _HEAD.size)

    def _expect(self, kind: bytes | None, size: int) -> None:
        self._kind = kind
        self._data = bytearray(size)
        self._room = memoryview(self._data)

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the next message; None unless the whole of it has arrived."""
        # Local; never waits.
        if self._is_torn:
            raise EOFError
        self._is_torn = True
        message = self._read()
        self._is_torn = False
        return message

    def _read(self) -> tuple[bytes, bytes] | None:
        while self._room:
            try:
                count = self._channel.recv_into(self._room, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                count = 0
            if count == 0:
                raise EOFError
            self._room = self._room[count:]
            if not self._room and self._kind is None:
                size, kind = _HEAD.unpack(self._data)
                self._expect(kind, size)
        assert self._kind is not None
        message = self._kind, bytes(self._data)
        self._expect(None, _HEAD.size)
        return message


def receive(channel: socket.socket) -> tuple[bytes, bytes] | None:
    """Receive one message."""
    head = _read(channel, _HEAD.size)
    if head is None:
        return None
    size, kind = _HEAD.unpack(head)
    body = _read(channel, size)
    return None if body is None else (kind, body)


def _read(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = channel.recv_into(view)
        except OSError:
            return None
        if count == 0:
            return None
        view = view[count:]
    return bytes(data)
