"""Handshake: both ends of a connection prove that they belong to the job.

    caller                            listener
    hello, nonce        ---->
                        <----         nonce
    proof               ---->
                        <----         proof

A proof is the HMAC of the hello, which contains the connection's purpose, and of both nonces, under
a secret of the job.
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
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Generic, TypeVar

from unisono.control.addresses import peer

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_MAX_PENDING = 256  # handshakes at a time; the oldest one is closed for another
LONGEST_WAIT_S = 3600.0
"""Longest timeout for `poll`, which accepts no infinity."""
T = TypeVar("T")


def call(sock: socket.socket, secret: bytes, hello: bytes, until: float) -> bool:
    """Run the caller's handshake; return whether the listener proves itself, too."""
    return _prove(sock, secret, hello, until, is_caller=True)


def answer(sock: socket.socket, secret: bytes, hello_bytes: int) -> bytes | None:
    """Run the listener's handshake; return the caller's hello, None without a proof."""
    # Without a time limit, because `Pending` closes the connection of a slow caller.
    hello = receive(sock, hello_bytes)
    return hello if _prove(sock, secret, hello, math.inf, is_caller=False) else None


def _prove(
    sock: socket.socket, secret: bytes, hello: bytes, until: float, *, is_caller: bool
) -> bool:
    """Send a proof of the secret; return whether the other side has sent a valid one."""
    side, other_side = (b"caller", b"listener") if is_caller else (b"listener", b"caller")
    mine = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(hello + mine if is_caller else mine)
    theirs = receive(sock, _NONCE_BYTES, until)

    def proof(prover: bytes, nonces: bytes) -> bytes:
        return hmac.new(secret, prover + hello + nonces, "sha256").digest()

    # Each proof names its side, so that no process can send back the proof that it has received.
    sock.sendall(proof(side, mine + theirs))
    received = receive(sock, _PROOF_BYTES, until)
    return hmac.compare_digest(received, proof(other_side, theirs + mine))


def receive(sock: socket.socket, size: int, until: float = math.inf) -> bytes:
    """Receive `size` bytes before the time `until`; raise OSError if that fails."""
    data = b""
    while len(data) < size:
        if until != math.inf:  # the limit holds for all parts together
            sock.settimeout(max(0.001, until - time.monotonic()))  # 0 means non-blocking
        part = sock.recv(size - len(data))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data


class Pending(Generic[T]):
    """Connections that haven't proved themselves yet, each with a thread that serves it."""

    # A connection: begun --admit returns something--> given to the caller
    #   begun --admit returns None or raises OSError, or it is the oldest of too many--> closed

    def __init__(
        self,
        admit: Callable[[socket.socket], T | None],
        max_pending: int,
        strangers: set[str] | None = None,
    ) -> None:
        self._admit, self._max_pending = admit, max_pending
        self._strangers = set() if strangers is None else strangers
        self._threads: dict[socket.socket, threading.Thread] = {}  # oldest first
        self._served: deque[tuple[socket.socket, T | None]] = deque()  # None: rejected
        self.wake: socket.socket
        """Becomes readable once `served` has a connection to yield or to close."""
        self.wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)  # one unread byte suffices

    def accept(self, listener: socket.socket) -> bool:
        """Accept the next connection, if any; raise OSError if a thread can't be started."""
        # At a Unix-domain socket processes of other users are dropped at once.
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # none, or its caller has closed it
            return False
        if sock.family == socket.AF_UNIX and not (caller := peer(sock)).is_own_user:
            self._strangers.add(str(caller))
            sock.close()
            return True
        sock.setblocking(True)  # `close` ends its waits
        self._threads[sock] = threading.Thread(target=partial(self._serve, sock), daemon=True)
        try:
            self._threads[sock].start()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if len(self._threads) > self._max_pending:
            oldest = next(iter(self._threads))
            del self._threads[oldest]
            hang_up(oldest)
        return True

    def _serve(self, sock: socket.socket) -> None:
        found = None
        try:
            with contextlib.suppress(OSError):
                found = self._admit(sock)
        finally:
            self._served.append((sock, found))
            with contextlib.suppress(OSError):  # closed, or full of unread bytes
                self._waker.send(b"!")

    def served(self) -> Iterator[tuple[socket.socket, T]]:
        """Yield the connections that were admitted, and close the others."""
        while self._served:
            sock, found = self._served.popleft()
            # A socket that isn't in `_threads` any more was closed as the oldest of too many.
            if self._threads.pop(sock, None) is None or found is None:
                sock.close()
            else:
                yield sock, found

    def close(self) -> None:
        """Close all connections, and wait for their threads; a second call does nothing."""
        for sock, thread in self._threads.items():
            _shut_down(sock)
            if thread.ident is not None:  # else it couldn't be started
                thread.join()
            sock.close()
        self._threads.clear()
        hang_up(self.wake)
        hang_up(self._waker)


def accept(
    listener: socket.socket,
    admit: Callable[[socket.socket], T | None],
    strangers: set[str],
    until: float = math.inf,
) -> Generator[tuple[socket.socket, T], None, None]:
    """Accept connections; yield those for which `admit` returns a value, with that value."""
    # Each has its own thread and the whole time: peers on a busy host are slow, and mustn't wait
    # for each other.
    listener.setblocking(False)
    readable = select.poll()
    with contextlib.closing(Pending(admit, _MAX_PENDING, strangers)) as pending:
        for watched in (listener, pending.wake):
            readable.register(watched.fileno(), select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            ready = [fd for fd, _ in readable.poll(min(left_s, LONGEST_WAIT_S) * 1000)]
            if pending.wake.fileno() in ready:
                pending.wake.recv(4096)  # first: what is served later wakes the next poll
            yield from pending.served()
            if listener.fileno() in ready:
                pending.accept(listener)


def hang_up(sock: socket.socket) -> None:
    """Close a connection, and end the wait of a thread that reads from it."""
    _shut_down(sock)
    sock.close()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
