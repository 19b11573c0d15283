"""Rounds between hosts that are connected directly: frames that come early, ranks that leave."""

from __future__ import annotations

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
LIMIT_BYTES = 4096
Ends = dict[int, tuple[socket.socket, socket.socket]]
"""By neighbour: the other ends of its connections for rounds and for the sideband."""


@contextmanager
def first_of(hosts: Sequence[Sequence[int]]) -> Iterator[tuple[Hub, Ends]]:
    """Make the hub of position 0, which warns at once; the test speaks for its neighbours."""
    part, ends = links(hosts, 0), Ends()
    lines: tuple[dict[int, Connection], dict[int, Connection]] = ({}, {})
    for near in part.behind:
        pairs = socket.socketpair(), socket.socketpair()
        for channel, (ours, _) in enumerate(pairs):
            lines[channel][near] = Connection(ours, None, LIMIT_BYTES)
        ends[near] = pairs[0][1], pairs[1][1]
    ranks = range(sum(map(len, hosts)))
    made = Hub(Peers(ranks, 0, part, lines, {}, SequenceNumbers()), None, 0.0)
    made.inline_bytes = LIMIT_BYTES
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
