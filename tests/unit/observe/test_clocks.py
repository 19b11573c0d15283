"""Clocks of several hosts become one by what can't have been otherwise."""

from __future__ import annotations

import random

from tests.support.records import MS, call
from unisono.observe.clocks import Moment, offsets
from unisono.observe.waits import Meeting, meetings
from unisono.recording import CollectiveRecord

HOUR = 3_600_000 * MS


def seen(shifts: dict[int, int], count: int = 200, name: str = "all_reduce") -> list[Meeting]:
    """Calls to which ranks come in any order, by clocks that are shifted."""
    draw = random.Random(1)
    records: dict[int, list[CollectiveRecord]] = {rank: [] for rank in shifts}
    for number in range(1, count + 1):
        came = [number * 30 + draw.expovariate(1) for _ in shifts]
        for each in call(number, *came, name=name):
            more = draw.randrange(MS // 2)
            arrival = each.arrival_ns + shifts[each.rank]
            one = each._replace(arrival_ns=arrival, duration_ns=each.duration_ns + more)
            records[each.rank].append(one)
    return meetings(records)


def test_ranks_of_one_host_need_no_offset() -> None:
    moments = {rank: Moment("a", 5, 5) for rank in (0, 1)}
    found = offsets(moments, seen({0: 0, 1: 0}))
    assert (found.by_rank, found.unsure_ns) == ({0: 0, 1: 0}, 0)
    assert offsets({}, []).by_rank == {}


def test_the_offset_of_another_host_is_found_within_what_it_says() -> None:
    shifts = {0: 0, 1: 0, 2: 17 * HOUR, 3: -HOUR}
    hosts = {0: "a", 1: "a", 2: "b", 3: "c"}
    moments = {rank: Moment(host, 0, 0) for rank, host in hosts.items()}
    found = offsets(moments, seen(shifts))
    assert found.unsure_ns < 2 * MS
    for rank, shift in shifts.items():
        assert abs(found.by_rank[rank] + shift) <= found.unsure_ns


def test_hosts_that_never_meet_the_first_one_are_reached_over_others() -> None:
    moments = {rank: Moment(host, 0, 0) for rank, host in enumerate("abc")}
    shifts = {0: 0, 1: 3 * HOUR, 2: 5 * HOUR}
    whole = seen(shifts)
    pairs = [
        Meeting({rank: each.records[rank] for rank in pair}, {})
        for each in whole
        for pair in ((0, 1), (1, 2))
    ]
    found = offsets(moments, pairs)
    assert abs(found.by_rank[2] + 5 * HOUR) <= found.unsure_ns < 5 * MS


def test_calls_that_a_rank_may_leave_early_bound_nothing() -> None:
    moments = {0: Moment("a", 100 * HOUR, 40 * HOUR), 1: Moment("b", 100 * HOUR, 90 * HOUR)}
    for met in ([], seen({0: 0, 1: 50 * HOUR}, name="broadcast")):
        found = offsets(moments, met)
        assert found.by_rank == {0: 0, 1: -50 * HOUR}  # by the time of day
        assert found.unsure_ns > 0
