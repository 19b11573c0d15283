"""The door of a process: who proves itself comes in, and nobody waits for those who don't."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from unisono.control.addresses import peer

__all__ = ("Check", "visitors")

_STRANGER_S = 1.0  # how long a connection may take to prove itself, in all
_AT_ONCE = 256  # connections that may be at it; the oldest one makes room
T = TypeVar("T")
Check = Callable[[socket.socket], Generator[int, bytes, "T | None"]]


@dataclass(slots=True)
class _Visit(Generic[T]):
    """One connection that hasn't proved itself yet."""

    sock: socket.socket
    talk: Generator[int, bytes, T | None]
    until: float
    wanted: int = 0
    said: bytes = b""

    def listen(self) -> tuple[bool, T | None]:
        """Take in what is there; tell whether the talk is over, and what came of it. Local."""
        try:
            self.wanted = self.wanted or next(self.talk)
            while part := self.sock.recv(self.wanted - len(self.said)):
                self.said += part
                if len(self.said) == self.wanted:
                    said, self.said = self.said, b""
                    self.wanted = self.talk.send(said)
        except StopIteration as end:
            return True, end.value
        except BlockingIOError:
            return False, None
        except OSError:
            pass
        return True, None


def visitors(
    listener: socket.socket,
    check: Check[T],
    until: float | None = None,
    alarm: socket.socket | None = None,
    refused: Callable[[str], None] | None = None,
) -> Generator[tuple[socket.socket, T], None, None]:
    """Give the connections that prove themselves; drop the others.

    Local. All talk at the same time, each for a second at most; at a Unix-domain socket processes
    of other users aren't heard.

    Args:
        listener: where they come.
        check: called with a connection: a generator that yields how many bytes it wants next, gets
            them, and returns what the connection has proved to be; None for a stranger.
        until: when to end, on the clock of ``time.monotonic``; None for never.
        alarm: ends it too, once there is something to read.
        refused: told of each process of another user that isn't heard.

    Yields:
        A connection, which doesn't block, and what it is.
    """
    visits: dict[socket.socket, _Visit[T]] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as held:
        held.callback(_close, visits)
        for watched in (listener, alarm):
            if watched is not None:
                selector.register(watched, selectors.EVENT_READ)

        def leave(sock: socket.socket) -> None:
            selector.unregister(sock)
            del visits[sock]

        while until is None or time.monotonic() < until:
            limits = [visit.until for visit in visits.values()] + ([until] if until else [])
            left = max(0.0, min(limits) - time.monotonic()) if limits else None
            ready = [key.fileobj for key, _ in selector.select(left)]
            if alarm in ready:
                return
            for sock in [sock for sock in visits if sock in ready]:
                is_over, found = visits[sock].listen()
                if is_over:
                    leave(sock)
                if is_over and found is None:
                    sock.close()
                elif found is not None:
                    yield sock, found
            late = [sock for sock in visits if visits[sock].until < time.monotonic()]
            for sock in late + [*visits][: max(0, len(visits) - _AT_ONCE)]:
                leave(sock)
                sock.close()
            if listener in ready:
                visit = _open(listener, check, refused)
                if visit is not None:
                    visits[visit.sock] = visit
                    selector.register(visit.sock, selectors.EVENT_READ)


def _open(
    listener: socket.socket, check: Check[T], refused: Callable[[str], None] | None
) -> _Visit[T] | None:
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # it has changed its mind
        return None
    if sock.family == socket.AF_UNIX and not (visitor := peer(sock)).is_own_user:
        sock.close()
        if refused is not None:
            refused(str(visitor))
        return None
    sock.setblocking(False)
    return _Visit(sock, check(sock), time.monotonic() + _STRANGER_S)


def _close(visits: dict[socket.socket, _Visit[T]]) -> None:
    for sock in visits:
        sock.close()
