"""Handshake: connections are accepted from processes that prove that they belong to the job.

Gloo accepts any connection. Before the proof, the data plane carries nothing but tensors of fixed
size, which nobody decodes: first a random number of each rank, then, from each
rank to each other directly, the HMAC of both their numbers under the secret of the job.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from unisono.control.addresses import peer
from unisono.errors import PeerRefusedError
from unisono.model import fallback
from unisono.payload.tensors import from_bytes, to_bytes
from unisono.topology import Group

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def strangers() -> str:
    """Name the processes of other users of this host that are connected to this one."""
    # Linux alone tells, and the process's id only to a user that may see it.
    with contextlib.suppress(OSError, ValueError, IndexError):
        mine = set(_inodes("self"))
        rows = [row for table in _TABLES for row in _rows(table)]
        ends = {remote: local for local, remote, _, inode in rows if inode in mine}
        found = {
            (uid, inode)
            for local, remote, uid, inode in rows
            if ends.get(local) == remote and uid != os.getuid()
        }
        if found:
            who = ", ".join(sorted(f"user {uid}{_process(inode)}" for uid, inode in found))
            return f"; a process of another user is connected to this one: {who}"
    return ""


def _rows(table: str) -> Iterator[tuple[str, str, int, str]]:
    """Give local and remote address, user and inode of each connection."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            yield columns[1], columns[2], int(columns[7]), columns[9]


def _inodes(pid: str) -> Iterator[str]:
    for file in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/{pid}/fd/{file}")
            if name.startswith("socket:["):
                yield name[8:-1]


def _process(inode: str) -> str:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if inode in _inodes(pid):
                return f" (pid {pid})"
    return ""


_MOST_PENDING = 256  # handshakes at a time; the oldest one makes room
T = TypeVar("T")
Check = Callable[[socket.socket], Generator[int, bytes, "T | None"]]


@dataclass(slots=True)
class _Handshake(Generic[T]):
    """One connection that hasn't proved itself yet."""

    sock: socket.socket
    dialogue: Generator[int, bytes, T | None]
    n_expected: int = 0
    received: bytes = b""

    def advance(self) -> tuple[bool, T | None]:
        """Read what is there; tell whether the dialogue is over, and its result."""
        try:
            self.n_expected = self.n_expected or next(self.dialogue)
            while part := self.sock.recv(self.n_expected - len(self.received)):
                self.received += part
                if len(self.received) == self.n_expected:
                    received, self.received = self.received, b""
                    self.n_expected = self.dialogue.send(received)
        except StopIteration as end:
            return True, end.value
        except BlockingIOError:
            return False, None
        except OSError:
            pass
        return True, None


class _Pending(Generic[T]):
    """The handshakes under way at one listener."""

    # A connection: accepted --its dialogue ends with a result--> given to the caller
    #   accepted --with None, an error, or as the oldest of too many--> dropped

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._handshakes: dict[socket.socket, _Handshake[T]] = {}

    def close(self) -> None:
        for sock in self._handshakes:
            sock.close()

    def add(self, sock: socket.socket, dialogue: Generator[int, bytes, T | None]) -> None:
        self._handshakes[sock] = _Handshake(sock, dialogue)
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._handshakes) > _MOST_PENDING:
            oldest = next(iter(self._handshakes))
            self._remove(oldest)
            oldest.close()

    def advance(self, ready: Collection[object]) -> Iterator[tuple[socket.socket, T]]:
        """Read from connections that are ready; give those that have proved themselves."""
        for sock in [sock for sock in self._handshakes if sock in ready]:
            is_over, proved = self._handshakes[sock].advance()
            if is_over:
                self._remove(sock)
            if is_over and proved is None:
                sock.close()
            elif proved is not None:
                yield sock, proved

    def _remove(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._handshakes[sock]


def accept_authenticated(
    listener: socket.socket,
    check: Check[T],
    until: float | None = None,
    stop: socket.socket | None = None,
    refused: Callable[[str], None] | None = None,
) -> Generator[tuple[socket.socket, T], None, None]:
    """Accept connections and authenticate them without letting one block another."""
    # All may prove themselves at the same time, and until the end: members of a busy host are
    # slow. At a Unix-domain socket processes of other users are dropped at once.
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        pending: _Pending[T] = _Pending(selector)
        for watched in (listener, stop):
            if watched is not None:
                selector.register(watched, selectors.EVENT_READ)
        with contextlib.closing(pending):
            while until is None or time.monotonic() < until:
                left_s = None if until is None else max(0.0, until - time.monotonic())
                ready = [key.fileobj for key, _ in selector.select(left_s)]
                if stop in ready:
                    return
                yield from pending.advance(ready)
                sock = _accept(listener, refused) if listener in ready else None
                if sock is not None:
                    pending.add(sock, check(sock))


def _accept(listener: socket.socket, refused: Callable[[str], None] | None) -> socket.socket | None:
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):  # it has changed its mind
        return None
    if sock.family == socket.AF_UNIX and not (client := peer(sock)).is_own_user:
        sock.close()
        if refused is not None:
            refused(str(client))
        return None
    sock.setblocking(False)
    return sock


_BYTES = 32


class Provable(fallback.CollectiveTransport, Protocol):
    """What the proof needs of a model."""

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        """Send row i of [n, *shape] to the i-th rank; row i comes from there."""


def authenticate(
    model: Provable,
    group: Group | None,
    secret: bytes,
    label: str,
    device: torch.device | None = None,
) -> None:
    """Let each rank of a group prove to each other that it knows the secret of the job."""
    # Collective over `group`.
    ranks, place = model.topology.members(group), model.topology.position(group)
    shape = (len(ranks), _BYTES)
    device = model.transport_device if device is None else device
    own = from_bytes(secrets.token_bytes(_BYTES), torch.uint8, shape[1:]).to(device)
    nonces = [to_bytes(row) for row in model.all_gather(own, group).cpu()]
    subject = f"{label} {list(ranks)}".encode()

    def proof(source: int, target: int) -> bytes:
        text = struct.pack("<II", source, target) + nonces[source] + nonces[target] + subject
        return hmac.new(secret, text, "sha256").digest()

    mine = b"".join(proof(place, other) for other in range(len(ranks)))
    received_rows = model.all_to_all(from_bytes(mine, torch.uint8, shape).to(device), group).cpu()
    proofs = [to_bytes(row) for row in received_rows]
    wrong = [
        ranks[other]
        for other in range(len(ranks))
        if other != place and not hmac.compare_digest(proofs[other], proof(other, place))
    ]
    if wrong:
        raise PeerRefusedError(
            f"rank {ranks[place]} refuses what answered as rank {wrong[0]}: it couldn't prove that "
            f"it belongs to this job{strangers()}",
            wrong[0],
        )
