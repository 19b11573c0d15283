"""Messages between the parent and one worker: <Q length, one byte of kind, then the body."""

from __future__ import annotations

import socket
import struct

__all__ = ("END", "ERROR", "RESULT", "TASK", "receive", "send")

TASK, RESULT, ERROR, END = b"t", b"r", b"e", b"q"
_HEAD = struct.Struct("<Qc")


def send(channel: socket.socket, kind: bytes, body: bytes = b"") -> None:
    """Send one message.

    Local.

    Raises:
        OSError: the other side is gone.
    """
    channel.sendall(_HEAD.pack(len(body), kind))
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[bytes, bytes] | None:
    """Receive one message.

    Local.

    Returns:
        Kind and body, or None once the other side is gone.
    """
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
