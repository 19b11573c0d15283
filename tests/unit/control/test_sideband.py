"""A sideband and its inquiries, in this process: no descriptors, nonsense, no room."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command import wait_until
from unisono.control.connection import Connection
from unisono.control.sideband import Sideband, State
from unisono.control.tree import Links, Seat
from unisono.host.status_socket import connected

LIMIT_S = 20.0
LINKS = Links(None, (1,), {1: (1,)})
SEATS = (Seat("a", (0,)), Seat("b", (1,)))


@pytest.fixture(autouse=True)
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pages"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("UNISONO_STATUS", str(folder))
    return folder


@contextmanager
def sideband(room_bytes: int = 1 << 17) -> Iterator[tuple[Sideband, Connection]]:
    """Serve a rank whose one neighbour, on another host, is played here."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room_bytes)
    connection = Connection(theirs, None, 1 << 24)
    before = set(threading.enumerate())
    made = Sideband(0, LINKS, {1: Connection(ours, None, 1 << 24)}, (), lambda _: State(), SEATS)
    (thread,) = set(threading.enumerate()) - before
    try:
        yield made, connection
    finally:
        made.close()
        thread.join(LIMIT_S)
        connection.close()
    assert not thread.is_alive()


def greeting(path: Path) -> bytes:
    sock = connected(path, LIMIT_S)
    assert sock is not None
    with sock:
        return sock.recv(100)


def test_without_a_descriptor_for_who_asks_its_thread_rests(status: Path) -> None:
    with sideband() as (_, _):
        (path,) = status.iterdir()
        at = os.open(status, os.O_RDONLY)
        asker = socket.socket(socket.AF_UNIX)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(at)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            begin_s, used_s = time.monotonic(), time.process_time()
            asker.connect(f"/proc/self/fd/{at}/{path.name}")
            asker.settimeout(1.5)
            with pytest.raises(TimeoutError):
                asker.recv(1)
            busy = (time.process_time() - used_s) / (time.monotonic() - begin_s)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert busy < 0.2
        asker.settimeout(LIMIT_S)
        with asker:
            assert asker.recv(100) == b'{"place": 0}\n'
        assert greeting(path) == b'{"place": 0}\n'
        os.close(at)


@pytest.mark.parametrize("request_", [b"[" * 60000, b"[]", b'{"ranks": 1, "limit_s": 1}', b"7"])
def test_a_request_that_cannot_be_read_ends_its_connection_alone(
    request_: bytes, status: Path
) -> None:
    with sideband():
        (path,) = status.iterdir()
        asker = connected(path, LIMIT_S)
        assert asker is not None
        with asker, asker.makefile("rb") as lines:
            assert lines.readline()
            asker.sendall(request_ + b"\n")
            assert lines.read() == b""
        own = "unisono-sideband-inquiry"
        assert wait_until(lambda: own not in {each.name for each in threading.enumerate()}, LIMIT_S)
        assert greeting(path) == b'{"place": 0}\n'
