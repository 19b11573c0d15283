"""Handshake: connections are accepted from those who prove that they belong to the job.

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
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from unisono.control.addresses import peer
from unisono.errors import PeerRefusedError
from unisono.model import fallback
from unisono.payload.memory import from_bytes, to_bytes
from unisono.topology import Group

__all__ = ("Check", "Provable", "authenticate", "strangers", "accept_authenticated")

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def strangers() -> str:
    """Name the processes of other users of this host that are connected to this one.

    Local. Linux alone tells. The process's id is known only to who may look at it.

    Returns:
        What can follow a sentence; empty where there is none, or none can be found.
    """
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
            words = line.split()
            yield words[1], words[2], int(words[7]), words[9]


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


def accept_authenticated(
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
    """Let each rank of a group prove to each other that it knows the secret of the job.

    Collective over `group`.

    Args:
        model: what carries the proofs.
        group: the ranks that take part.
        secret: what strangers can't know.
        label: tells groups of the same ranks apart.
        device: where the group takes tensors; None for where the model does.

    Raises:
        PeerRefusedError: another process answered in place of a rank; on those it answered.
        CollectiveError: a peer failed or didn't come.
    """
    ranks, place = model.topology.members(group), model.topology.position(group)
    shape = (len(ranks), _BYTES)
    device = model.transport_device if device is None else device
    own = from_bytes(secrets.token_bytes(_BYTES), torch.uint8, shape[1:]).to(device)
    numbers = [to_bytes(row) for row in model.all_gather(own, group).cpu()]
    subject = f"{label} {list(ranks)}".encode()

    def proof(source: int, target: int) -> bytes:
        text = struct.pack("<II", source, target) + numbers[source] + numbers[target] + subject
        return hmac.new(secret, text, "sha256").digest()

    mine = b"".join(proof(place, other) for other in range(len(ranks)))
    told = model.all_to_all(from_bytes(mine, torch.uint8, shape).to(device), group).cpu()
    proofs = [to_bytes(row) for row in told]
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
