"""Memory that two ends share: what is put comes out once, whole, and a sleeper is woken."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from unisono.control.connection import (
    ALL,
    FAIL,
    GIVE,
    START_BYTES,
    Connection,
    ConnectionClosed,
    split_blobs,
)
from unisono.host import mailbox, memory
from unisono.host.mailbox import MAILBOX_BYTES, Mailbox

FOREVER = float("inf")
Frame = tuple[int, int, bytes]
Ends = tuple[Connection, Connection]

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")


def shared() -> tuple[tuple[socket.socket, Mailbox], tuple[socket.socket, Mailbox]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    first = mailbox.send(ours)
    second = mailbox.receive(theirs)
    assert first is not None
    assert second is not None
    return (ours, first), (theirs, second)


@pytest.fixture
def ends() -> Iterator[Ends]:
    first, second = shared()
    made = Connection(*first, 2 * MAILBOX_BYTES), Connection(*second, 2 * MAILBOX_BYTES)
    yield made
    for line in made:
        line.close()


def is_readable(line: Connection) -> bool:
    return bool(select.select([line.fd], [], [], 0)[0])


def send(line: Connection, kind: int, seq: int, body: bytes) -> None:
    if line.mailbox is None or not line.mailbox.put(kind, seq, body):
        line.finish(kind, seq, body, FOREVER)


def taken(line: Connection) -> Frame:
    """Take the next frame, waiting for it."""
    line.sleep(True)
    while (frame := line.take()) is None:
        select.select([line.fd], [], [], 10)
    line.sleep(False)
    return frame


@pytest.mark.parametrize("size", [0, 1, 100, MAILBOX_BYTES - 1, MAILBOX_BYTES, MAILBOX_BYTES + 1])
def test_frames_of_any_length_come_out_whole_and_once(ends: Ends, size: int) -> None:
    bodies = [os.urandom(size) for _ in range(3)]
    for seq, body in enumerate(bodies, 1):
        for source, target in (ends, ends[::-1]):
            sender = threading.Thread(target=send, args=(source, GIVE, seq, body))
            sender.start()  # what is longer than a mailbox may fill the socket
            assert taken(target) == (GIVE, seq, body)
            assert target.take() is None
            sender.join()


def test_who_looks_is_not_woken_and_who_sleeps_is(ends: Ends) -> None:
    source, target = ends
    send(source, GIVE, 1, b"a")
    assert target.mailbox is not None and target.mailbox.has_frame()
    assert not is_readable(target)
    assert target.take() == (GIVE, 1, b"a")
    target.sleep(True)
    send(source, ALL, 1, b"b")
    assert is_readable(target)
    target.sleep(False)
    assert target.take() == (ALL, 1, b"b")
    assert is_readable(target)  # having been woken isn't a frame
    assert target.take() is None
    assert not is_readable(target)
    send(source, GIVE, 2, b"c")
    assert not is_readable(target)


def test_a_report_of_a_failure_goes_past_a_frame_that_nobody_took(ends: Ends) -> None:
    source, target = ends
    send(source, GIVE, 1, b"a")
    source.send(FAIL, 1, b"b", FOREVER)
    assert [taken(target), taken(target)] == [(GIVE, 1, b"a"), (FAIL, 1, b"b")]


def test_what_was_put_before_the_end_is_taken_before_it(ends: Ends) -> None:
    source, target = ends
    send(source, GIVE, 1, b"last")
    source.close()
    assert target.take() == (GIVE, 1, b"last")
    with pytest.raises(ConnectionClosed, match="closed the connection"):
        target.take()


def test_an_absurd_length_takes_no_more_than_the_mailbox() -> None:
    (ours, first), (theirs, second) = shared()
    with ours, theirs:
        first._words[first._out + mailbox._SIZE] = 2**64 - 1
        first._words[first._out] = 9
        frame = second.take()
    assert frame is not None
    assert len(frame[2]) == MAILBOX_BYTES


@pytest.mark.parametrize("size", [0, 4096])
def test_memory_of_another_size_is_refused(size: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    fd = os.memfd_create("test")
    os.ftruncate(fd, size)
    with ours, theirs:
        socket.send_fds(ours, [b"+"], [fd])
        os.close(fd)
        with pytest.raises(OSError, match="another size"):
            mailbox.receive(theirs)


def test_who_refuses_or_hangs_up_is_an_error() -> None:
    for said, why in ((b"?", "refused"), (b"", "refused"), (b"+", "no more descriptors")):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            ours.sendall(said)
            ours.close()
            with pytest.raises(OSError, match=why):
                mailbox.receive(theirs)


def test_with_a_line_its_memory_goes() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for line in [Connection(*end, 1) for end in shared()]:
            line.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_shared_memory_there_is_no_mailbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        assert mailbox.send(ours) is None
        assert mailbox.receive(theirs) is None


def test_who_took_a_frame_and_left_before_being_woken_is_no_error(ends: Ends) -> None:
    source, target = ends
    target.sleep(True)
    target.close()
    send(source, ALL, 1, b"last")
    with pytest.raises(ConnectionClosed):
        source.take()


def test_short_blobs_of_a_long_body_are_bytes_and_long_ones_views() -> None:
    given = [b"short", b"x" * 20_000, b"", b"y" * START_BYTES]
    sizes = [5, 20_000, 0, 50_000]
    head = struct.Struct("<4Q")
    blobs, read = split_blobs(head.pack(*sizes) + b"".join(given), head, 30_000)
    assert [type(blob) for blob in blobs] == [bytes, memoryview, bytes, bytes]
    assert [bytes(blob) for blob in blobs] == given
    assert list(read) == sizes
