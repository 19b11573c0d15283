"""Messages between the parent and one worker: <Q length, one byte of kind, then the body."""

from __future__ import annotations

import queue
import socket
import struct
from contextvars import ContextVar
from dataclasses import dataclass

TASK, RESULT, ERROR, DONE, END = b"t", b"r", b"e", b"d", b"q"
_HEADER = struct.Struct("<Qc")


@dataclass(frozen=True, slots=True)
class OwnChannel:
    """A worker's end of its channel, for further tasks and their answers."""

    socket: socket.socket
    tasks: queue.SimpleQueue[bytes] | None = None  # None if no other thread reads the channel

    def next_task(self) -> bytes | None:
        """Wait for the next task; empty for the end, None once the parent has ended."""
        if self.tasks is not None:
            return self.tasks.get()
        message = receive(self.socket)
        return None if message is None else message[1]


OWN: ContextVar[OwnChannel] = ContextVar("OWN")


def send(channel: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """Send one message."""
    channel.sendall(_HEADER.pack(len(body), kind))  # separate, as joining them would copy the body
    channel.sendall(body)


def task(body: bytes) -> memoryview:
    """Build the message of a task, for sending it in parts."""
    return memoryview(_HEADER.pack(len(body), TASK) + body)


class Inbox:
    """Reader of one channel's messages; by default it never waits."""

    def __init__(self, channel: socket.socket, flags: int = socket.MSG_DONTWAIT) -> None:
        self._channel = channel
        self._flags = flags
        self._is_torn = False  # set while reading: after Ctrl-C, the position is unknown
        self._expect(None, _HEADER.size)

    def _expect(self, kind: bytes | None, size: int) -> None:
        """Make room for the body of a message of this kind, or for a header if `kind` is None."""
        self._kind = kind
        self._data = bytearray(size)
        self._room = memoryview(self._data)

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the next message, None if it isn't whole; raise EOFError at the channel's end."""
        if self._is_torn:
            raise EOFError
        self._is_torn = True
        message = self._read()
        self._is_torn = False
        return message

    def _read(self) -> tuple[bytes, bytes] | None:
        """Continue to read the header or body; return the message once it is complete."""
        while self._room:
            try:
                count = self._channel.recv_into(self._room, 0, self._flags)
            except BlockingIOError:
                return None
            except OSError:  # the other side has reset it, which is an end, too
                count = 0
            if count == 0:
                raise EOFError
            self._room = self._room[count:]
            if not self._room and self._kind is None:  # the header is whole, and a body follows
                size, kind = _HEADER.unpack(self._data)
                self._expect(kind, size)
        assert self._kind is not None
        message = self._kind, bytes(self._data)
        self._expect(None, _HEADER.size)
        return message


def receive(channel: socket.socket) -> tuple[bytes, bytes] | None:
    """Wait for one message; None once the other side has closed the channel."""
    try:
        return Inbox(channel, 0).take()
    except EOFError:
        return None


def peek(sock: socket.socket) -> bytes | None:
    """Return a socket's next byte, which stays there; None if there is none, empty at the end."""
    try:
        return sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
