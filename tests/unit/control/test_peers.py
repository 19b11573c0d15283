"""Peers in this process: no descriptors, nonsense, no room; how a hub fails and ends."""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import until
from unisono.control.connection import ANSWER, ASK, FAIL, SEEN, Connection, FailureReport, Frame
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import Links, Seat, links
from unisono.errors import CollectiveError, CollectiveTimeoutError
from unisono.host.status_socket import connected

LIMIT_S = 20.0
LINKS = Links(None, (1, 2), {1: (1,), 2: (2,)})
SEATS = (Seat("a", (0,)), Seat("b", (1,)), Seat("c", (2,)))
LONG_BYTES = 1 << 21


pytestmark = pytest.mark.usefixtures("own_pages")


@contextmanager
def sideband() -> Iterator[tuple[Peers, Connection, Connection]]:
    """Serve a rank whose two neighbours, on other hosts, are played here."""
    pairs = [socket.socketpair() for _ in (1, 2)]
    ours, theirs = (
        [Connection(sock, None, 1 << 24) for sock in end] for end in zip(*pairs, strict=True)
    )
    before = set(threading.enumerate())
    lines: Any = {}, dict(enumerate(ours, 1))
    made = Peers(range(3), 0, LINKS, lines, {}, SequenceNumbers(), SEATS)
    (thread,) = set(threading.enumerate()) - before
    try:
        yield made, theirs[0], theirs[1]
    finally:
        made.close()
        thread.join(LIMIT_S)
        for connection in theirs:
            connection.close()
    assert not thread.is_alive()


def taken(connection: Connection) -> Frame:
    """Wait for the next frame."""
    frame = until(connection.take, LIMIT_S)
    assert frame is not None
    return frame


def greeting(path: Path) -> bytes:
    sock = connected(path, LIMIT_S)
    assert sock is not None
    with sock:
        return sock.recv(100)


def test_without_a_descriptor_for_who_asks_its_thread_rests(own_pages: Path) -> None:
    with sideband():
        (path,) = own_pages.iterdir()
        at = os.open(own_pages, os.O_RDONLY)
        asker = socket.socket(socket.AF_UNIX)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(at)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            begin_s, used_s = time.monotonic(), time.process_time()
            asker.connect(f"/proc/self/fd/{at}/{path.name}")
            asker.settimeout(0.5)
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
    request_: bytes, own_pages: Path
) -> None:
    with sideband():
        (path,) = own_pages.iterdir()
        asker = connected(path, LIMIT_S)
        assert asker is not None
        with asker, asker.makefile("rb") as lines:
            assert lines.readline()
            asker.sendall(request_ + b"\n")
            assert lines.read() == b""
        own = "unisono-sideband-inquiry"
        until(lambda: own not in {each.name for each in threading.enumerate()}, LIMIT_S)
        assert greeting(path) == b'{"place": 0}\n'


def test_a_rank_that_reads_late_gets_a_long_part_of_an_inquiry_whole() -> None:
    """Half of it ended the connection, and so the job."""
    body = json.dumps({"to": 2, "of": 1, "body": "x" * LONG_BYTES}).encode()
    with sideband() as (made, first, second), ThreadPoolExecutor(1) as executor:
        end = time.monotonic() + LIMIT_S
        executor.submit(first.send, SEEN, 0, body, end).result()
        first.send(ASK, 0, b'{"to": 0, "of": 1, "group": ""}', end)
        assert taken(first)[0] == ANSWER  # it has waited for room, and given that up
        executor.submit(made.fail, FailureReport("peer", "gone"))
        assert taken(second) == (SEEN, 0, body)
        assert taken(second)[0] == FAIL


@contextmanager
def hub() -> Iterator[list[Hub]]:
    """Make the hub of a rank whose only neighbour is silent; who drops it from the list ends it."""
    pairs = [socket.socketpair() for _ in range(2)]
    lines: Any = [{1: Connection(ours, None, 1 << 16)} for ours, _ in pairs]
    before = set(threading.enumerate())
    peers = Peers(range(2), 0, links(["here"] * 2, 0), (lines[0], lines[1]), {}, SequenceNumbers())
    (thread,) = set(threading.enumerate()) - before
    held = [Hub(peers, None, 60.0)]
    del peers
    with pairs[0][1], pairs[1][1]:
        yield held
        held.clear()
        gc.collect()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_hub_that_has_failed_ends_with_its_last_reference_and_keeps_no_frame() -> None:
    """What is raised later has no traceback of the first time, whose frames keep the users' own."""

    class Batch:
        pass

    def fail(held: list[Hub]) -> weakref.ref[Batch]:
        batch = Batch()
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError, match="rank 1 never came"):
                held[0].exchange(b"mine", time.monotonic())
        return weakref.ref(batch)

    with hub() as held:
        batch = fail(held)
        gc.collect()
        assert batch() is None


def test_an_interrupt_at_the_end_of_a_round_is_what_later_rounds_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not that one was called within another; and the lock is free."""

    def interrupted(self: Peers) -> None:
        raise KeyboardInterrupt

    with hub() as held:
        with monkeypatch.context() as patched:
            patched.setattr(Hub, "_round", lambda *_: ([b"mine"], [4]))
            patched.setattr(Peers, "leave", interrupted)
            with pytest.raises(KeyboardInterrupt):
                held[0].exchange(b"mine", time.monotonic() + LIMIT_S)
        for _ in range(2):
            with pytest.raises(CollectiveError, match="interrupted .* out of step"):
                held[0].exchange(b"mine", time.monotonic() + LIMIT_S)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(held[0].peers.lock.acquire, blocking=False).result()
