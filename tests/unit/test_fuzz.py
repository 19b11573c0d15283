"""What comes over the control plane is a frame or an error of ours."""

from __future__ import annotations

import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from unisono.control import connection, signatures
from unisono.control.connection import (
    ALL,
    FAIL,
    GIVE,
    LEAVE,
    Connection,
    ConnectionClosed,
    read_failure,
)
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import links
from unisono.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PeerFailedError,
)
from unisono.model import fallback

LIMIT_BYTES = 4096
HEAD = struct.Struct("<BQQ")
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
frames = st.builds(
    lambda kind, seq, size, body: HEAD.pack(kind, seq, size) + body,
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 64) | st.integers(0, 2**64 - 1),
    st.binary(max_size=64),
)
streams = st.binary(max_size=200) | st.lists(frames, max_size=4).map(b"".join)
bodies = st.builds(
    lambda sizes, blobs: struct.pack(f"<{len(sizes)}Q", *sizes) + blobs,
    st.lists(st.integers(0, 8) | st.integers(0, 2**64 - 1), max_size=3),
    st.binary(max_size=24),
)
bundles = st.binary(max_size=64) | bodies

reports = st.recursive(
    st.none() | st.text(max_size=5) | st.floats() | st.integers(),
    lambda inner: (
        st.dictionaries(st.sampled_from(["kind", "text", "rank", "x"]), inner) | st.lists(inner)
    ),
    max_leaves=6,
)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, Connection]]:
    ours, theirs = socket.socketpair()
    line = Connection(ours, None, LIMIT_BYTES)
    with theirs:
        yield theirs, line
    line.close()


@FUZZ
@example(HEAD.pack(LEAVE, 1, 0), 1)
@given(streams, st.integers(1, 50))
def test_a_line_gives_frames_within_its_limit_or_closes(stream: bytes, step: int) -> None:
    taken = []
    with pair() as (peer, line):
        try:
            for at in range(0, len(stream), step):
                peer.sendall(stream[at : at + step])
                while (frame := line.take()) is not None:
                    taken.append(frame)
            peer.shutdown(socket.SHUT_WR)
            while (frame := line.take()) is not None:
                taken.append(frame)
        except ConnectionClosed:
            pass
    again = b"".join(HEAD.pack(kind, seq, len(body)) + body for kind, seq, body in taken)
    assert stream.startswith(again)
    assert all(kind <= LEAVE and len(body) <= LIMIT_BYTES for kind, _, body in taken)


@pytest.mark.parametrize("size", [LIMIT_BYTES + 1, 2**40, 2**64 - 1])
def test_a_frame_that_says_it_is_huge_takes_no_memory(size: int) -> None:
    with pair() as (peer, line):
        peer.sendall(HEAD.pack(GIVE, 1, size) + b"x" * 100)
        tracemalloc.start()
        with pytest.raises(ConnectionClosed, match=f"{size} bytes"):
            line.take()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


@FUZZ
@given(st.lists(st.binary(max_size=80), min_size=1, max_size=4))
def test_what_ranks_say_of_their_calls_is_blobs_or_a_mismatch(said: list[bytes]) -> None:
    try:
        blobs = signatures.unpack(said, said[0], lambda: range(len(said)))
    except CollectiveMismatchError as error:
        assert "rank 0: " in str(error)
    else:
        assert len(blobs) == len(said)


@FUZZ
@given(st.text(max_size=40), st.lists(st.binary(max_size=40), min_size=1, max_size=4))
def test_what_is_packed_is_unpacked(call: str, blobs: list[bytes]) -> None:
    if len(call.encode("utf-8", "replace")) < 100 and call.isprintable():
        head = signatures.call_head(call, signatures.site())
        packed = [head + blob for blob in blobs]
        assert signatures.unpack(packed, head, lambda: range(len(blobs))) == blobs


@FUZZ
@example(b"[" * 100_000)
@given(st.binary(max_size=60) | reports.map(lambda value: json.dumps(value).encode()))
def test_a_report_of_a_failure_is_read_or_closes_the_line(body: bytes) -> None:
    try:
        failure = read_failure(body)
    except ConnectionClosed:
        return
    assert isinstance(failure.kind, str)
    assert isinstance(failure.text, str)
    assert isinstance(failure.rank, int)
    assert read_failure(failure.encode()) == failure


@contextmanager
def hub(place: int, *hosts: list[int]) -> Iterator[tuple[Hub, socket.socket, socket.socket]]:
    """Make the hub of one of two ranks, on one host or on these; the test speaks for the other."""
    ours, main = socket.socketpair()
    beside, aside = socket.socketpair()
    other = 1 - place
    part = links(hosts or [[0, 1]], place)
    lines = (
        {other: Connection(ours, None, LIMIT_BYTES)},
        {other: Connection(beside, None, LIMIT_BYTES)},
    )
    made = Hub(Peers(range(2), place, part, lines, {}, SequenceNumbers()), None, 10.0)
    with main, aside:
        yield made, main, aside
    made.peers.close()


@FUZZ
@given(bundles, st.integers(0, 1), st.sampled_from([[[0, 1]], [[0], [1]]]))
def test_any_bundle_ends_a_round_with_blobs_or_names_the_peer(
    bundle: bytes, place: int, hosts: list[list[int]]
) -> None:
    with hub(place, *hosts) as (made, main, aside):
        aside.shutdown(socket.SHUT_WR)  # so that no report is waited for
        kind = GIVE if place == 0 and len(hosts) == 1 else ALL
        main.sendall(HEAD.pack(kind, 1, len(bundle)) + bundle)
        try:
            blobs, _ = made.exchange(b"mine", 10.0)
        except PeerFailedError as error:
            assert error.rank == 1 - place
        else:
            assert len(blobs) == 2


@FUZZ
@given(streams, streams, st.sampled_from([[[0, 1]], [[0], [1]]]))
def test_any_bytes_on_its_lines_end_a_round_in_time(
    stream: bytes, beside: bytes, hosts: list[list[int]]
) -> None:
    with hub(0, *hosts) as (made, main, aside):
        aside.sendall(beside)
        aside.shutdown(socket.SHUT_WR)  # so that no report is waited for
        main.sendall(stream)
        main.shutdown(socket.SHUT_WR)
        try:
            blobs, _ = made.exchange(b"mine", 10.0)
        except CollectiveError:
            return
        assert blobs[0] == b"mine"


def test_a_damaged_report_of_a_failure_names_who_sent_it() -> None:
    with hub(0) as (made, main, _):
        main.sendall(HEAD.pack(FAIL, 1, 4) + b"null")
        with pytest.raises(PeerFailedError, match="invalid report") as caught:
            made.exchange(b"mine", 10.0)
        assert caught.value.rank == 1


def test_a_damaged_report_beside_leaves_no_dead_thread() -> None:
    with hub(0) as (made, main, aside):
        aside.sendall(HEAD.pack(FAIL, 0, 2) + b"[]")
        body = struct.pack("<Q", 2) + b"ab"
        main.sendall(HEAD.pack(GIVE, 1, len(body)) + body)
        assert made.exchange(b"mine", 10.0)[0] == [b"mine", b"ab"]
        assert any(thread.name == "unisono-sideband" for thread in threading.enumerate())


@FUZZ
@given(bundles, st.integers(0, 3), st.integers(0, 300))
def test_a_body_is_as_many_blobs_as_ranks_or_an_error(
    body: bytes, count: int, inline_bytes: int
) -> None:
    head = struct.Struct(f"<{count}Q")
    with suppress(ValueError):
        blobs, sizes = connection.split_blobs(body, head, inline_bytes)
        assert len(blobs) == len(sizes) == count
        assert head.pack(*sizes) + b"".join(blobs) == body


@FUZZ
@given(st.binary(min_size=fallback.FRAME_BYTES, max_size=fallback.FRAME_BYTES))
def test_a_frame_of_the_derived_exchange_is_read_or_too_long(frame: bytes) -> None:
    part = fallback.inline_part(frame)
    assert part is None or len(part) == fallback.length_of(frame)
