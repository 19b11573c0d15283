"""Handshake: both ends of a connection prove that they belong to the job.

    caller                            listener
    hello, nonce        ---->
                        <----         nonce
    proof               ---->
                        <----         proof

A proof is the HMAC of the hello, which says what the connection is for, and of both nonces, under a
secret of the job.
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

from unisono.control.addresses import peer

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_CALLER, _LISTENER = b"caller", b"listener"
_MOST_PENDING = 256  # handshakes at a time; the oldest one makes room
_LONGEST_WAIT_S = 3600.0  # `poll` takes no infinity
T = TypeVar("T")


def call(sock: socket.socket, secret: bytes, hello: bytes, until: float) -> bool:
    """Prove the end that has connected; return whether the listener proves itself, too."""
    return _prove(sock, secret, hello, (_CALLER, _LISTENER), hello, until)


def answer(
    sock: socket.socket, secret: bytes, hello_bytes: int, until: float = math.inf
) -> bytes | None:
    """Prove the end that has accepted; return the caller's hello, None if it proves nothing."""
    hello = receive(sock, hello_bytes, until)
    return hello if _prove(sock, secret, hello, (_LISTENER, _CALLER), b"", until) else None


def _prove(
    sock: socket.socket,
    secret: bytes,
    hello: bytes,
    sides: tuple[bytes, bytes],
    first: bytes,
    until: float,
) -> bool:
    mine = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(first + mine)
    theirs = receive(sock, _NONCE_BYTES, until)

    def proof(side: bytes, nonces: bytes) -> bytes:
        return hmac.new(secret, side + hello + nonces, "sha256").digest()

    sock.sendall(proof(sides[0], mine + theirs))
    return hmac.compare_digest(receive(sock, _PROOF_BYTES, until), proof(sides[1], theirs + mine))


def receive(sock: socket.socket, size: int, until: float = math.inf) -> bytes:
    """Receive that many bytes; without a limit until the connection ends."""
    data = b""
    while len(data) < size:
        if until != math.inf:  # all of them in time, not each
            sock.settimeout(max(0.001, until - time.monotonic()))
        part = sock.recv(size - len(data))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data


def accept(
    listener: socket.socket,
    admit: Callable[[socket.socket], T | None],
    strangers: set[str],
    until: float = math.inf,
    stop: socket.socket | None = None,
) -> Generator[tuple[socket.socket, T], None, None]:
    """Accept connections, and yield those that `admit`, in a thread for each, lets in."""
    # Members of a busy host are slow: each has until the end, and none waits for another. At a
    # Unix-domain socket processes of other users are dropped at once.
    admitted: deque[tuple[socket.socket, T | None]] = deque()
    pending: dict[socket.socket, threading.Thread] = {}
    wake, waker = socket.socketpair()

    def serve(sock: socket.socket) -> None:
        found = None
        try:
            with contextlib.suppress(OSError):
                found = admit(sock)
        finally:
            admitted.append((sock, found))
            with contextlib.suppress(OSError):  # `accept` is over
                waker.send(b"!")

    def begin(sock: socket.socket) -> None:
        if sock.family == socket.AF_UNIX and not (caller := peer(sock)).is_own_user:
            strangers.add(str(caller))
            sock.close()
            return
        sock.setblocking(True)  # the end of `accept` ends it
        pending[sock] = threading.Thread(target=partial(serve, sock), daemon=True)
        try:
            pending[sock].start()
        except RuntimeError as error:  # there is no room for one more
            raise OSError(str(error)) from error
        if len(pending) > _MOST_PENDING:
            oldest = next(iter(pending))
            del pending[oldest]
            hang_up(oldest)

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
                if pending.pop(sock, None) is None or found is None:
                    sock.close()
                else:
                    yield sock, found
            if listener.fileno() in ready:
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                    begin(listener.accept()[0])
    finally:
        for sock, thread in pending.items():
            _shut_down(sock)
            if thread.ident is not None:
                thread.join()
            sock.close()
        hang_up(wake)
        hang_up(waker)


def hang_up(sock: socket.socket) -> None:
    """Close a connection, also for a thread that waits for it."""
    _shut_down(sock)
    sock.close()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
