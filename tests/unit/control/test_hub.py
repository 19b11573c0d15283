"""Rounds between hosts that are connected directly: frames that come early, ranks that leave."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.support.processes import until
from unisono.control.connection import ALL, GIVE, Blobs, Connection
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import links
from unisono.errors import PeerFailedError

HEAD = struct.Struct("<BQQ")
LIMIT_BYTES = 1 << 22
Lines = tuple[dict[int, Connection], dict[int, Connection]]
Ends = dict[int, tuple[socket.socket, socket.socket]]
"""By neighbour: the other ends of its connections for rounds and for the sideband."""


def hub_of(hosts: Sequence[Sequence[int]], place: int, lines: Lines) -> Hub:
    """Make the hub of a position, which warns at once."""
    part, ranks = links(hosts, place), range(sum(map(len, hosts)))
    made = Hub(Peers(ranks, place, part, lines, {}, SequenceNumbers()), None, 0.0)
    made.inline_bytes = LIMIT_BYTES
    return made


@contextmanager
def first_of(hosts: Sequence[Sequence[int]]) -> Iterator[tuple[Hub, Ends]]:
    """Make the hub of position 0; the test speaks for its neighbours."""
    ends: Ends = {}
    lines: Lines = ({}, {})
    for near in links(hosts, 0).behind:
        pairs = socket.socketpair(), socket.socketpair()
        for channel, (ours, _) in enumerate(pairs):
            lines[channel][near] = Connection(ours, None, LIMIT_BYTES)
        ends[near] = pairs[0][1], pairs[1][1]
    made = hub_of(hosts, 0, lines)
    try:
        yield made, ends
    finally:
        made.peers.close()
        for end in [end for pair in ends.values() for end in pair]:
            end.close()


def send(end: socket.socket, kind: int, seq: int, *blobs: bytes) -> None:
    """Send the frame of a round."""
    body = struct.pack(f"<{len(blobs)}Q", *map(len, blobs)) + b"".join(blobs)
    end.sendall(HEAD.pack(kind, seq, len(body)) + body)


@contextmanager
def waiting(made: Hub, caplog: pytest.LogCaptureFixture) -> Iterator[Future[Blobs]]:
    """Begin a round in a thread; enter the block once it waits asleep, and has warned of that."""
    caplog.clear()
    with ThreadPoolExecutor(1) as pool:
        round_of = pool.submit(made.exchange, b"mine", 10.0)
        until(lambda: "is still waiting" in caplog.text, 10.0)
        yield round_of


def test_a_frame_of_the_next_round_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    with first_of([[0], [1], [2]]) as (made, ends):
        send(ends[1][0], ALL, 1, b"a1")
        send(ends[1][0], ALL, 2, b"a2")
        with waiting(made, caplog) as round_of:
            send(ends[2][0], ALL, 1, b"b1")
            assert round_of.result()[0] == [b"mine", b"a1", b"b1"]
        send(ends[2][0], ALL, 2, b"b2")
        assert made.exchange(b"mine", 10.0)[0] == [b"mine", b"a2", b"b2"]


def test_another_host_may_be_faster_than_a_rank_of_this_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with first_of([[0, 2], [1, 3]]) as (made, ends):
        send(ends[1][0], ALL, 1, b"b", b"d")
        with waiting(made, caplog) as round_of:
            send(ends[2][0], GIVE, 1, b"c")
            assert round_of.result()[0] == [b"mine", b"b", b"c", b"d"]


def test_a_rank_may_leave_once_it_has_given(caplog: pytest.LogCaptureFixture) -> None:
    with first_of([[0], [1], [2]]) as (made, ends):
        send(ends[1][0], ALL, 1, b"a")
        with waiting(made, caplog) as round_of:
            for end in ends[1]:
                end.close()
            send(ends[2][0], ALL, 1, b"b")
            assert round_of.result()[0] == [b"mine", b"a", b"b"]
        with pytest.raises(PeerFailedError) as caught:
            made.exchange(b"mine", 10.0)
        assert caught.value.rank == 1


def test_a_rank_that_gave_and_died_at_once_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with first_of([[0], [1], [2]]) as (made, ends):
        send(ends[1][0], ALL, 1, b"a")
        for end in ends[1]:
            end.close()
        with pytest.raises(PeerFailedError, match="rank 1 is gone: it closed") as caught:
            made.exchange(b"mine", 10.0)
        assert caught.value.rank == 1


@pytest.mark.parametrize(("kind", "seq"), [(ALL, 1), (ALL, 3), (GIVE, 2)])
def test_a_frame_out_of_turn_is_its_senders_last(
    kind: int, seq: int, caplog: pytest.LogCaptureFixture
) -> None:
    with first_of([[0], [1], [2]]) as (made, ends):
        send(ends[1][0], ALL, 1, b"a")
        ends[1][1].close()  # so that no report is waited for
        with waiting(made, caplog) as round_of:
            send(ends[1][0], kind, seq, b"a")
            send(ends[2][0], ALL, 1, b"b")
            assert round_of.result()[0] == [b"mine", b"a", b"b"]
        with pytest.raises(PeerFailedError, match="it sent frame") as caught:
            made.exchange(b"mine", 10.0)
        assert caught.value.rank == 1


def test_ranks_may_send_more_at_once_than_sockets_hold() -> None:
    lines: list[Lines] = [({}, {}) for _ in range(3)]
    for one, other in itertools.combinations(range(3), 2):
        for channel in (0, 1):
            ends = socket.socketpair()
            lines[one][channel][other] = Connection(ends[0], None, LIMIT_BYTES)
            lines[other][channel][one] = Connection(ends[1], None, LIMIT_BYTES)
    hubs = [hub_of([[0], [1], [2]], place, lines[place]) for place in range(3)]
    blobs = [bytes([place]) * (LIMIT_BYTES // 2) for place in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for given, _ in pool.map(lambda made, blob: made.exchange(blob, 10.0), hubs, blobs):
            assert given == blobs
    for made in hubs:
        made.peers.close()
