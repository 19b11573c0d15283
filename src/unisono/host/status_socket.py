"""Status sockets: where others of this user ask a rank, beside the pages of this host."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.host.status_page import SOCKET_NAME, _pids, _private, folder, start_ticks

_BACKLOG = 16


class StatusSocket:
    """A listening Unix-domain socket in the folder of status pages, for this user alone."""

    def __init__(self, sock: socket.socket, path: Path) -> None:
        self.sock: socket.socket = sock
        self.fd: int = sock.fileno()
        self._remove = weakref.finalize(self, _remove, path, os.getpid())

    @classmethod
    def make(cls) -> StatusSocket | None:
        """Listen; None where there can be no pages either."""
        place, ticks = folder(), start_ticks(os.getpid())
        if place is None or not ticks or not _private(place, makes=True):
            return None
        path = place.absolute() / f"{os.getpid()}-{ticks}-{_pids()}-{secrets.token_hex(4)}.ask"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(path) as address:
                sock.bind(address)
                os.chmod(address, 0o600)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError:
            sock.close()
            path.unlink(missing_ok=True)
            return None
        return cls(sock, path)

    def remove(self) -> None:
        """Remove the file, so that new connections fail; harmless the second time."""
        self._remove()

    def close(self) -> None:
        """Close it, and take the file away where this process made it."""
        self._remove()
        self.sock.close()


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of all this
        with contextlib.suppress(OSError):
            path.unlink()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Give an address of a file that fits: the kernel takes 107 bytes."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def sockets_of(processes: Collection[tuple[int, int]]) -> dict[tuple[int, int], Path]:
    """Find where some processes of this user can be asked."""
    place = folder()
    if place is None or not _private(place, makes=False):
        return {}
    here = _pids()
    found = {}
    for path in sorted(place.iterdir()):
        name = SOCKET_NAME.fullmatch(path.name)
        if name and int(name[3]) == here and (int(name[1]), int(name[2])) in processes:
            found[int(name[1]), int(name[2])] = path
    return found


def connected(path: Path, timeout_s: float) -> socket.socket | None:
    """Connect to a status socket; None where nobody listens there any more."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        with _short(path) as address:
            sock.connect(address)
    except OSError:
        sock.close()
        return None
    return sock
