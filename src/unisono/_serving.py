"""The replica's side of a pool: takes calls from a socket until the pool closes it."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from typing import Any, TextIO

import cloudpickle

from unisono import _context
from unisono.control.addresses import local_address
from unisono.errors import PayloadError
from unisono.launchers import _channel
from unisono.launchers._worker import describe
from unisono.model import ComputationModel

__all__ = ("CALL", "SECRET_BYTES", "serve")

CALL = b"c"
SECRET_BYTES = 32
_END = None


def serve(local_rank: int, address: str, secret: bytes, owner: int, has_prefix: bool) -> None:
    """Run what the pool sends, in order.

    Local, but for what the functions do.

    Args:
        local_rank: of this replica.
        address: of the pool's socket.
        secret: [SECRET_BYTES] proves that this replica belongs to the pool.
        owner: id of the pool's process.
        has_prefix: whether lines of output begin with the rank.
    """
    model = _context.current_model()
    rank = model.topology.rank
    is_process = os.getpid() != owner
    if has_prefix and is_process:
        sys.stdout = _Prefixed(sys.stdout, f"[rank {rank}] ")
        sys.stderr = _Prefixed(sys.stderr, f"[rank {rank}] ")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(local_address(address))
        sock.sendall(secret + rank.to_bytes(4, "little"))
        calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(
            target=_listen, args=(sock, calls, model, is_process), name="unisono-pool", daemon=True
        ).start()
        while (body := calls.get()) is not _END:
            _channel.send(sock, *_outcome(local_rank, body))


def _outcome(local_rank: int, body: bytes) -> tuple[bytes, bytes]:
    """Run one call; give the kind and the body of its answer."""
    try:
        fn, args, kwargs, takes_rank = cloudpickle.loads(body)
        result = fn(local_rank, *args, **kwargs) if takes_rank else fn(*args, **kwargs)
        try:
            return _channel.RESULT, cloudpickle.dumps(result)
        except Exception as error:  # an object's own __reduce__ may raise anything
            kind = type(result).__qualname__
            raise PayloadError(f"the result, a {kind}, can't be pickled: {error}") from error
    except BaseException as error:  # SystemExit too: the pool decides what it means
        return _channel.ERROR, cloudpickle.dumps(describe(error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _listen(
    sock: socket.socket,
    calls: queue.SimpleQueue[bytes | None],
    model: ComputationModel,
    is_process: bool,
) -> None:
    """Take calls in; once the pool is gone or gave up, leave whatever this replica is doing."""
    while (message := _channel.receive(sock)) is not None and message[0] == CALL:
        calls.put(message[1])
    if message is not None:
        calls.put(_END)
    elif is_process:
        os._exit(1)
    else:
        model.abort()
        calls.put(_END)


class _Prefixed:
    """A text stream whose lines begin with a prefix and are written whole."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._held = ""
        self._is_at_start = True

    def write(self, text: str) -> int:
        self._held += text
        whole, newline, self._held = self._held.rpartition("\n")
        if newline:
            self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        held, self._held = self._held, ""
        self._put(held)

    def _put(self, text: str) -> None:
        if text:
            start = self._prefix if self._is_at_start else ""
            self._stream.write(start + self._prefix.join(text.splitlines(keepends=True)))
            self._is_at_start = text.endswith("\n")
        self._stream.flush()  # in one piece, so that no other rank's line comes between

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
