"""Handshake: both ends of a connection prove that they belong to the job.

    caller                 listener
    nonce        ---->
                 <----     nonce
    proof        ---->
                 <----     proof

A proof is the HMAC of both nonces and of what the connection is for, under a secret of the job.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_MOST_PENDING = 256  # handshakes at a time; the oldest one makes room
_SIDES = (b"caller", b"listener")
_LONGEST_WAIT_S = 3600.0  # `poll` takes no infinity
T = TypeVar("T")


def prove(sock: socket.socket, secret: bytes, purpose: bytes, *, is_caller: bool) -> bool:
    """Prove this end of a connection, and return whether the other end has proved itself."""
    own, other = _SIDES if is_caller else _SIDES[::-1]
    mine = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(mine)
    theirs = receive(sock, _NONCE_BYTES)

    def proof(side: bytes, nonces: bytes) -> bytes:
        return hmac.new(secret, side + purpose + nonces, "sha256").digest()

    sock.sendall(proof(own, mine + theirs))
    return hmac.compare_digest(receive(sock, _PROOF_BYTES), proof(other, theirs + mine))


def receive(sock: socket.socket, size: int) -> bytes:
    """Receive that many bytes."""
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data


def accept(
    listener: socket.socket,
    admit: Callable[[socket.socket], T | None],
    until: float = math.inf,
    stop: socket.socket | None = None,
) -> Generator[tuple[socket.socket, T], None, None]:
    """Accept connections, and yield those that `admit`, in a thread for each, lets in."""
    # Members of a busy host are slow: each has until the end, and none waits for another.
    admitted: deque[tuple[socket.socket, T | None]] = deque()
    pending: dict[socket.socket, None] = {}
    wake, waker = socket.socketpair()

    def serve(sock: socket.socket) -> None:
        found = None
        with contextlib.suppress(OSError):
            found = admit(sock)
        admitted.append((sock, found))
        with contextlib.suppress(OSError):  # `accept` is over
            waker.send(b"!")

    readable = select.poll()
    for watched in (listener, wake, *([] if stop is None else [stop])):
        readable.register(watched.fileno(), select.POLLIN)
    listener.setblocking(False)
    try:
        while (left_s := until - time.monotonic()) > 0:
            ready = [fd for fd, _ in readable.poll(min(left_s, _LONGEST_WAIT_S) * 1000)]
            if stop is not None and stop.fileno() in ready:
                return
            if wake.fileno() in ready:
                wake.recv(_MOST_PENDING)
            while admitted:
                sock, found = admitted.popleft()
                pending.pop(sock, None)
                if found is None:
                    sock.close()
                else:
                    yield sock, found
            if listener.fileno() in ready:
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                    sock, _ = listener.accept()
                    sock.settimeout(None if until == math.inf else left_s)
                    pending[sock] = None
                    threading.Thread(target=partial(serve, sock), daemon=True).start()
                if len(pending) > _MOST_PENDING:
                    hang_up(oldest := next(iter(pending)))
                    del pending[oldest]
    finally:
        for sock in (*pending, wake, waker):
            hang_up(sock)


def hang_up(sock: socket.socket) -> None:
    """Close a connection, also for a thread that waits for it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
