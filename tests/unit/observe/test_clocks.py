"""Clocks of several hosts become one by what can't have been otherwise."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.support.records import MS, call, recorded
from unisono.observe import clocks
from unisono.observe.clocks import Moment
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


def on(*hosts: str) -> dict[int, Moment]:
    """Have a rank on each of these hosts."""
    return {rank: Moment(host, 0, 0) for rank, host in enumerate(hosts)}


def offsets(moments: dict[int, Moment], met: Sequence[Meeting]) -> tuple[dict[int, int], int]:
    """Give by rank what to add to its clock, and how far it may be off then."""
    found = clocks.offsets(list(moments.values()), met, lambda record: moments[record.rank].host)
    by_rank = {rank: found.by_host[each.host] for rank, each in moments.items()}
    return by_rank, found.unsure_ns


def test_ranks_of_one_host_need_no_offset() -> None:
    assert offsets(on("a", "a"), seen({0: 0, 1: 0})) == ({0: 0, 1: 0}, 0)
    assert offsets({}, []) == ({}, 0)


def test_the_offset_of_another_host_is_found_within_what_it_says() -> None:
    shifts = {0: 0, 1: 0, 2: 17 * HOUR, 3: -HOUR}
    by_rank, unsure_ns = offsets(on(*"aabc"), seen(shifts))
    assert unsure_ns < 2 * MS
    for rank, shift in shifts.items():
        assert abs(by_rank[rank] + shift) <= unsure_ns


def test_hosts_that_never_meet_the_first_one_are_reached_over_others() -> None:
    pairs = [
        Meeting({rank: each.records[rank] for rank in pair}, {})
        for each in seen({0: 0, 1: 3 * HOUR, 2: 5 * HOUR})
        for pair in ((0, 1), (1, 2))
    ]
    by_rank, unsure_ns = offsets(on(*"abc"), pairs)
    assert abs(by_rank[2] + 5 * HOUR) <= unsure_ns < 5 * MS


def test_calls_that_a_rank_may_leave_early_bound_nothing() -> None:
    moments = {0: Moment("a", 100 * HOUR, 40 * HOUR), 1: Moment("b", 100 * HOUR, 90 * HOUR)}
    for met in ([], seen({0: 0, 1: 50 * HOUR}, name="broadcast")):
        by_rank, unsure_ns = offsets(moments, met)
        assert by_rank == {0: 0, 1: -50 * HOUR}  # by the time of day
        assert unsure_ns > 0


def test_calls_that_were_taken_for_one_are_left_out() -> None:
    """As where a rank that was killed has lost records, and made calls of their numbers later."""
    for downtime in (HOUR // 60, -HOUR // 60):
        met = [*seen({0: 0, 1: 3 * HOUR}), *seen({0: 0, 1: 3 * HOUR + downtime}, 3)]
        by_rank, unsure_ns = offsets(on("a", "b"), met)
        assert abs(by_rank[1] + 3 * HOUR) <= unsure_ns < 2 * MS


def test_a_call_that_a_host_left_before_it_came_is_left_out() -> None:
    mixed = [recorded(0, 9, 0, 1), recorded(1, 9, 5000, 1), recorded(2, 9, 20, 1)]
    met = [*seen({0: 0, 1: 0, 2: HOUR}), Meeting(dict(enumerate(mixed)), {})]
    by_rank, unsure_ns = offsets(on(*"aab"), met)
    assert abs(by_rank[2] + HOUR) <= unsure_ns < 2 * MS


def test_clocks_that_drift_are_compared_in_the_middle() -> None:
    met = []
    for number in range(1, 101):
        at_ms = number * HOUR // 100 // MS
        first, second = call(number, at_ms, at_ms)
        late = second.arrival_ns + second.arrival_ns // 20_000
        met += meetings({0: [first], 1: [second._replace(arrival_ns=late)]})
    by_rank, unsure_ns = offsets(on("a", "b"), met)
    assert abs(by_rank[1] + HOUR // 40_000) < 5 * MS
    assert HOUR // 45_000 < unsure_ns < HOUR // 35_000
