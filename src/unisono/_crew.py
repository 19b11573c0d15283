"""The replicas of a pool as the pool's process sees them."""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

from unisono._serving import CALL, SECRET_BYTES, serve
from unisono.control.addresses import listen_locally
from unisono.errors import LaunchError
from unisono.launchers import _channel
from unisono.lifecycle import spawn

__all__ = ("Answer", "Crew")

_STRANGER_S = 1.0  # how long a connection may take to prove itself
_END_S = 10.0
Answer = tuple[bytes, bytes]


class Crew:
    """One set of replicas: the thread that spawned them, and a connection to each."""

    def __init__(
        self, size: int, backend: str | None, has_prefix: bool, options: dict[str, Any]
    ) -> None:
        self._lines: dict[int, socket.socket] = {}
        self._error: BaseException | None = None
        self._ended, self._end = socket.socketpair()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        with ExitStack() as stack:
            listener, address = listen_locally(stack)
            args = (address, self._secret, os.getpid(), has_prefix)
            self._thread = threading.Thread(
                target=self._spawn,
                args=(backend, args, size, options),
                name="unisono-pool-spawn",
                daemon=True,
            )
            self._thread.start()
            try:
                while len(self._lines) < size:
                    self._welcome(listener, size)
            except BaseException:  # Ctrl-C too: no replica is left behind
                self.stop(is_orderly=False)
                raise
        self._forget = weakref.finalize(self, _hang_up, list(self._lines.values()))

    def _spawn(
        self, backend: str | None, args: tuple[Any, ...], size: int, options: dict[str, Any]
    ) -> None:
        try:
            spawn(backend, serve, args, nproc_per_node=size, **options)
        except BaseException as error:  # it is raised where the pool is used
            self._error = error
        finally:
            self._end.close()

    def _welcome(self, listener: socket.socket, size: int) -> None:
        """Take one connection; one that doesn't know the secret is dropped."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select()]
        if self._ended in ready:
            raise self._why()
        sock, _ = listener.accept()
        sock.settimeout(_STRANGER_S)
        with suppress(OSError):
            said = b""
            while len(said) < SECRET_BYTES + 4:
                part = sock.recv(SECRET_BYTES + 4 - len(said))
                if not part:
                    break
                said += part
            rank = int.from_bytes(said[SECRET_BYTES:], "little")
            is_ours = hmac.compare_digest(said[:SECRET_BYTES], self._secret)
            if is_ours and rank < size and rank not in self._lines:
                sock.settimeout(None)
                self._lines[rank] = sock
                return
        sock.close()

    def _why(self) -> BaseException:
        self._thread.join()
        return self._error or LaunchError("the replicas of the pool have ended")

    def has_ended(self) -> bool:
        """Tell whether a replica is gone. Local."""
        return not self._thread.is_alive() or any(map(_is_closed, self._lines.values()))

    def send(self, rank: int, body: bytes) -> None:
        """Give a replica its next call. Local."""
        with suppress(OSError):  # `hear` says why it is gone
            _channel.send(self._lines[rank], CALL, body)

    def hear(self, busy: Iterable[int], limit: float | None) -> tuple[int, Answer] | None:
        """Wait for the next answer; None once the limit has passed. Local.

        Raises:
            WorkerFailedError: a replica died.
        """
        with selectors.DefaultSelector() as selector:
            for rank in busy:
                selector.register(self._lines[rank], selectors.EVENT_READ, rank)
            selector.register(self._ended, selectors.EVENT_READ)
            left = None if limit is None else max(0.0, limit - time.monotonic())
            ranks = [key.data for key, _ in selector.select(left)]
        for rank in ranks:
            if rank is not None:
                answer = _channel.receive(self._lines[rank])
                if answer is not None:
                    return rank, answer
        if ranks:
            raise self._why()
        return None

    def stop(self, is_orderly: bool) -> None:
        """End the replicas: in their own time, or at once. Local."""
        if is_orderly:
            for line in self._lines.values():
                with suppress(OSError):
                    _channel.send(line, _channel.END)
            self._thread.join(_END_S)
        _hang_up(list(self._lines.values()))
        self._thread.join(_END_S)
        self._ended.close()


def _hang_up(lines: list[socket.socket]) -> None:
    for line in lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        line.close()


def _is_closed(line: socket.socket) -> bool:
    """Tell whether the other side is gone; between calls it has nothing to say. Local."""
    try:
        return line.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
