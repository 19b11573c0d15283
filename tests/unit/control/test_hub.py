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
from unisono.control.connection import ALL, FAIL, GIVE, Blobs, Connection, FailureReport
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.signatures import SequenceNumbers, call_head
from unisono.control.tree import links
from unisono.errors import CollectiveTimeoutError, PeerFailedError

HEAD = struct.Struct("<BQQ")
LIMIT_BYTES = 1 << 22
BARRIER = call_head("barrier", b"train.py:12")
Lines = tuple[dict[int, Connection], dict[int, Connection]]
Ends = dict[int, tuple[socket.socket, socket.socket]]
"""By neighbour: the other ends of its connections for rounds and for the sideband."""


def hub_of(
    hosts: Sequence[Sequence[int]], place: int, lines: Lines, warn_after_s: float = 0.0
) -> Hub:
    """Make the hub of a position, which warns at once if not told otherwise."""
    part, ranks = links(hosts, place), range(sum(map(len, hosts)))
    made = Hub(Peers(ranks, place, part, lines, {}, SequenceNumbers()), None, warn_after_s)
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


@contextmanager
def all_of(hosts: Sequence[Sequence[int]]) -> Iterator[list[Hub]]:
    """Make the hubs of all positions, which don't warn."""
    places = range(sum(map(len, hosts)))
    lines: list[Lines] = [({}, {}) for _ in places]
    for one, other in itertools.combinations(places, 2):
        if other in links(hosts, one).behind:
            for channel in (0, 1):
                ends = socket.socketpair()
                lines[one][channel][other] = Connection(ends[0], None, LIMIT_BYTES)
                lines[other][channel][one] = Connection(ends[1], None, LIMIT_BYTES)
    hubs = [hub_of(hosts, place, lines[place], 100.0) for place in places]
    try:
        yield hubs
    finally:
        for made in hubs:
            made.peers.close()


def test_ranks_may_send_more_at_once_than_sockets_hold() -> None:
    blobs = [bytes([place]) * (LIMIT_BYTES // 2) for place in range(3)]
    with all_of([[0], [1], [2]]) as hubs, ThreadPoolExecutor(3) as pool:
        for given, _ in pool.map(lambda made, blob: made.exchange(blob, 10.0), hubs, blobs):
            assert given == blobs


def test_a_long_value_waits_asleep_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    with first_of([[0], [1], [2]]) as (made, ends):
        for end in ends[2]:
            end.close()
        waits: list[object] = []
        line = made.peers.rounds[1]
        wait = line._until_writable
        monkeypatch.setattr(line, "_until_writable", lambda *args: waits.append(wait(*args)))
        with pytest.raises(CollectiveTimeoutError, match="rank 1 never arrived"):
            made.exchange(bytes(LIMIT_BYTES // 2), 0.2)
        assert len(waits) < 10


def test_a_rank_that_cannot_send_hears_of_a_failure() -> None:
    with first_of([[0], [1], [2]]) as (made, ends):
        report = FailureReport("peer", "rank 2 is gone: it died", 2).encode()
        with ThreadPoolExecutor(1) as pool:
            round_of = pool.submit(made.exchange, bytes(LIMIT_BYTES // 2), 60.0)
            until(lambda: made.peers.waits[0] == (1,), 10.0)
            ends[1][1].sendall(HEAD.pack(FAIL, 0, len(report)) + report)
            with pytest.raises(PeerFailedError, match="it died") as caught:
                round_of.result(10.0)
        assert caught.value.rank == 2


def test_a_rank_that_failed_and_is_gone_is_not_the_culprit() -> None:
    with first_of([[0], [1], [2]]) as (made, ends):
        report = FailureReport("peer", "rank 2 is gone: it died", 2).encode()
        with ThreadPoolExecutor(1) as pool:
            round_of = pool.submit(made.exchange, b"mine", 60.0)
            until(lambda: made.peers.waits[0] == (1, 2), 10.0)
            ends[1][1].sendall(HEAD.pack(FAIL, 0, len(report)) + report)
            for end in ends[1]:
                end.close()
            with pytest.raises(PeerFailedError, match="it died") as caught:
                round_of.result(10.0)
        assert caught.value.rank == 2


def test_a_rank_that_left_is_missed_although_one_of_this_host_is_late(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with first_of([[0, 3], [1], [2]]) as (made, ends):
        send(ends[3][0], GIVE, 1, b"c")
        send(ends[1][0], ALL, 1, b"a")
        with waiting(made, caplog) as round_of:
            for end in ends[1]:
                end.close()
            until(lambda: made._gone, 10.0)
            send(ends[2][0], ALL, 1, b"b")
            assert round_of.result()[0] == [b"mine", b"a", b"b", b"c"]
        with pytest.raises(PeerFailedError) as caught:
            made.exchange(b"mine", 10.0)
        assert caught.value.rank == 1


def test_a_rank_that_gave_and_is_gone_is_missed_before_the_last_one_begins() -> None:
    with all_of([[0], [1], [2]]) as hubs, ThreadPoolExecutor(2) as pool:
        dead = pool.submit(hubs[1].exchange, BARRIER, 10.0)
        round_of = pool.submit(hubs[0].exchange, BARRIER, 10.0)
        until(lambda: 1 in hubs[0].peers.waits[1], 10.0)
        vars(hubs[1].peers).update(_send=lambda *_: None, _send_failure=lambda: None)  # silent
        for channel in (hubs[1].peers.rounds, hubs[1].peers.sideband):
            channel[0]._sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerFailedError) as caught:
            round_of.result()
        assert caught.value.rank == 1
        with pytest.raises(PeerFailedError):
            dead.result()


def test_a_rank_below_names_the_one_that_is_late_on_another_host() -> None:
    with all_of([[0, 1], [2, 3]]) as hubs, ThreadPoolExecutor(3) as pool:
        pool.submit(hubs[0].exchange, BARRIER, 10.0)
        pool.submit(hubs[2].exchange, BARRIER, 10.0)
        with pytest.raises(CollectiveTimeoutError, match="^rank 3 never reached barrier"):
            hubs[1].exchange(BARRIER, 0.5)


def test_a_warning_reaches_the_ranks_below(caplog: pytest.LogCaptureFixture) -> None:
    with all_of([[0, 1], [2]]) as hubs, ThreadPoolExecutor(2) as pool:
        below = pool.submit(hubs[1].exchange, BARRIER, 10.0)
        until(lambda: hubs[1]._kind == ALL, 10.0)
        hubs[0].warn_after_s = 0.0
        above = pool.submit(hubs[0].exchange, BARRIER, 10.0)
        until(lambda: len(caplog.messages) == 2, 10.0)
        assert caplog.messages[0].startswith("rank 0 of 3 is still waiting: rank 2 never reached")
        assert caplog.messages[0] == caplog.messages[1]
        hubs[2].exchange(BARRIER, 10.0)
        assert above.result()[0] == below.result()[0] == [BARRIER] * 3
