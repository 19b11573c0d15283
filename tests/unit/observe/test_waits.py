"""Who came last, worked out from records: arrivals count, durations don't."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar

import pytest

from tests.support.records import MS, call, recorded, steps
from unisono.observe import waits as waiting
from unisono.observe.waits import Clock, Meeting, common_clock, meetings, waits
from unisono.recording.records import CollectiveRecord

NOTHING = (0.0, 0.0)
HOUR = 3_600_000 * MS
Records = dict[int, list[CollectiveRecord]]


def by_rank(*records: CollectiveRecord) -> Records:
    found: Records = {}
    for each in records:
        found.setdefault(each.rank, []).append(each)
    return found


def test_the_late_rank_is_named_within_three_steps() -> None:
    found = waits(steps((0, 200, 0), (0, 200, 0), (0, 200, 0)))
    assert found.slowest == 1
    assert found.lost_s == pytest.approx((0, 0.6, 0))
    assert found.waited_s == pytest.approx((0.6, 0, 0.6))
    assert found.last == (0, 3, 0)
    assert found.calls == 3
    (line,) = found.lines
    assert (line.name, line.site, line.slowest) == ("all_reduce", "train.py:7", 1)
    assert (line.waiting_s, line.moving_s) == pytest.approx((1.2, 0.009))


def test_a_sum_makes_all_ranks_as_slow_and_its_duration_names_nobody() -> None:
    slow = [recorded(rank, n, 2000 * n, 1500) for n in range(1, 50) for rank in (0, 1)]
    found = waits(by_rank(*slow))
    assert found.slowest is None
    assert found.lost_s == NOTHING
    assert found.in_calls_s == pytest.approx((73.5, 73.5))


def test_what_is_little_beside_the_work_costs_nobody_time() -> None:
    assert waits(steps(*[(0, 0.9)] * 100, work_ms=2)).lost_s == NOTHING  # below 1 ms
    little = waits(steps((0, 0), *[(0, 40)] * 100, work_ms=1000))
    assert little.lost_s == NOTHING  # below 5 %
    assert waits(steps(*[(0, 60)] * 100, work_ms=1000)).slowest == 1


def test_a_few_hiccups_name_nobody() -> None:
    assert waits(steps((0, 200), (0, 200), *[(0, 0)] * 20)).slowest is None
    mixed = [(0, 200), (200, 0), (0, 200), (200, 0), (0, 200)]
    assert waits(steps(*mixed)).slowest is None


def test_a_small_delay_in_every_step_is_named_in_twenty() -> None:
    late = [(0, 8)]
    assert waits(steps(*late * 19)).slowest is None
    assert waits(steps(*late * 20)).slowest == 1
    others = [(0, 8, 0, 0), (3, 0, 0, 0), (0, 0, 3, 0)]
    assert waits(steps(*[*others[:1] * 2, *others] * 10)).slowest == 1
    assert waits(steps(*others * 20)).slowest is None  # less than four times as much


def test_balanced_runs_name_nobody() -> None:
    draw = random.Random(0)
    for size in (2, 3, 8):
        for _ in range(100):
            late = [[draw.expovariate(1 / 4) for _ in range(size)] for _ in range(60)]
            assert waits(steps(*late)).slowest is None


def test_who_is_done_before_the_last_one_comes_has_not_waited_for_it() -> None:
    root = recorded(0, 1, 10, 2, name="broadcast")
    late = recorded(1, 1, 500, 2, name="broadcast")
    found = waits(by_rank(root, late))
    assert found.lost_s == NOTHING
    assert found.waited_s == NOTHING
    assert found.in_calls_s == pytest.approx((0.002, 0.002))


def test_a_call_within_another_is_counted_once() -> None:
    outer = [recorded(0, 1, 0, 310), recorded(1, 1, 300, 10)]
    inner = [recorded(0, 2, 5, 300, name="barrier"), recorded(1, 2, 301, 5, name="barrier")]
    found = waits(by_rank(*outer, *inner))
    assert found.lost_s == pytest.approx((0, 0.301))
    assert found.waited_s == pytest.approx((0.301, 0))
    assert sum(line.total_s for line in found.lines) == pytest.approx(0.32)


def test_only_the_last_hundred_calls_are_counted_by_who_came_last() -> None:
    found = waits(steps(*[(50, 0)] * 30, *[(0, 50)] * 99))
    assert found.last == (1, 99)


class Counted(tuple[int, ...]):
    """Ranks of a group that count how often they are looked through."""

    looks: ClassVar[list[int]] = []

    def __iter__(self) -> Iterator[int]:
        self.looks.append(len(self))
        return super().__iter__()

    def __hash__(self) -> int:
        self.looks.append(len(self))
        return super().__hash__()


def test_the_work_grows_with_ranks_and_calls_and_not_with_their_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, count = 40, 30
    found: list[int] = []
    last_of = waiting._last_of

    def counted(meeting: Meeting) -> int:
        found.append(1)
        return last_of(meeting)

    monkeypatch.setattr(waiting, "_last_of", counted)
    everybody = Counted(range(size))
    records = {
        rank: [each._replace(ranks=everybody) for each in of_rank]
        for rank, of_rank in steps(*[[0.0] * size] * count).items()
    }
    assert waits(records).calls == count
    assert len(found) == count
    assert len(Counted.looks) <= 2 * size  # of each rank's records once, and not of each record


def test_a_call_that_a_rank_has_not_recorded_meets_nobody() -> None:
    lone = recorded(0, 1, 0, 5)
    other_group = call(1, 0, 300, group="a")
    failed = [recorded(rank, 3, 0, 1, name=name) for rank, name in enumerate(("send", "barrier"))]
    met = meetings(by_rank(lone, *other_group, *failed))
    assert [set(each.records) for each in met] == [{0, 1}]
    assert met[0].records[0].group == "a"


def test_a_second_context_counts_from_one_again() -> None:
    first, second = call(1, 0, 100), call(1, 1000, 1300)
    met = meetings(by_rank(*second, *first))
    assert [each.waited_ns(0) for each in met] == [100 * MS, 300 * MS]


def test_a_killed_rank_has_no_last_calls_and_its_next_context_is_not_taken_for_them() -> None:
    first = [each for number in (1, 2, 3, 4) for each in call(number, 10 * number, 10 * number + 1)]
    killed = [each for each in first if each.rank == 0 or each.number < 3]
    second = [each for number in (1, 2, 3, 4) for each in call(number, 900 + number, 900 + number)]
    met = meetings(by_rank(*killed, *second))
    assert [each.records[0].number for each in met] == [1, 2, 1, 2, 3, 4]
    assert [each.waited_ns(0) for each in met] == [MS, MS, 0, 0, 0, 0]


def test_calls_that_two_threads_begin_at_once_are_of_one_context() -> None:
    """The number is given a moment before the time is taken."""
    by_number = [call(number, came, came) for number, came in ((1, 0), (2, 9), (3, 7), (4, 12))]
    swapped = [each._replace(arrival_ns=8 * MS) for each in by_number[1] if each.rank == 1]
    others = [each for calls in by_number for each in calls if (each.number, each.rank) != (2, 1)]
    met = meetings(by_rank(*others, *swapped))
    assert sorted(each.records[1].number for each in met) == [1, 2, 3, 4]


def test_a_context_that_is_recorded_from_a_later_call_on_is_another_one() -> None:
    """As where a block is traced in the middle of each."""
    first = [each for number in (1, 2, 3) for each in call(number, number, number)]
    second = [each for number in (2, 3, 4) for each in call(number, 50 + number, 50 + number)]
    met = meetings(by_rank(*first, *second))
    assert [each.records[1].number for each in met] == [1, 2, 3, 2, 3, 4]


def test_disjoint_groups_of_one_name_have_calls_of_their_own() -> None:
    """As on MPI, where a communicator's number is that of its own ranks."""
    pairs = ((0, 1), (2, 3))
    records = [
        recorded(rank, number, 10 * number, 1, ranks=ranks, group="communicator 3", world_size=4)
        for number in (1, 2)
        for ranks in pairs
        for rank in ranks
    ]
    met = meetings(by_rank(*records))
    assert sorted(tuple(each.records) for each in met) == sorted(2 * pairs)


def test_a_receiver_waits_for_a_sender() -> None:
    pair: dict[str, Any] = {"group": "rank 0 to rank 1"}
    sent = recorded(0, 1, 400, 1, name="send", **pair)
    received = recorded(1, 1, 0, 402, name="recv", **pair)
    assert waits(by_rank(sent, received)).lost_s == pytest.approx((0.4, 0))


def started(number: int, *came_ms: tuple[float, float], **others: Any) -> list[CollectiveRecord]:
    """Records of a call that ranks start, and wait for later: when they come, and when they wait.

    It ends a millisecond after the last one has come, or when it is waited for.
    """
    done_ms = max(came for came, _ in came_ms) + 1
    return [
        recorded(
            *(rank, number, came, max(done_ms, wait) - came),
            overlap_ns=round((wait - came) * MS),
            **others,
        )
        for rank, (came, wait) in enumerate(came_ms)
    ]


def test_nobody_waits_for_a_call_before_its_handle() -> None:
    def five(wait_ms: float, late_ms: float) -> Records:
        """Rank 1 comes 100 ms after rank 0; each waits for its handle so long after it came."""
        each = [
            started(n, (300 * n, 300 * n + wait_ms), (300 * n + 100, 300 * n + 100 + late_ms))
            for n in range(1, 6)
        ]
        return by_rank(*chain(*each))

    found = waits(five(200, 200))
    assert (found.calls, found.slowest, found.last) == (5, None, (0, 0))
    assert (found.lost_s, found.waited_s, found.in_calls_s) == (NOTHING, NOTHING, NOTHING)
    found = waits(five(20, 100))
    assert found.slowest == 1
    assert found.waited_s == pytest.approx((5 * 0.08, 0))
    assert found.lost_s == pytest.approx((0, 5 * 0.08))


def test_a_call_beside_one_that_was_started_is_counted() -> None:
    outer = started(1, (0, 300), (310, 320))
    inner = [recorded(0, 1, 100, 51, group="a"), recorded(1, 1, 150, 1, group="a")]
    found = waits(by_rank(*outer, *inner))
    assert found.waited_s == pytest.approx((0.06, 0))
    assert found.in_calls_s == pytest.approx((0.062, 0.001))
    assert sum(line.waiting_s for line in found.lines) == pytest.approx(0.06)


def test_one_rank_alone_loses_nothing() -> None:
    assert waits({0: [recorded(0, 1, 0, 5, ranks=(0,))]}).lost_s == (0.0,)
    assert waits({}).slowest is None


def test_what_the_clocks_leave_open_costs_nobody_time() -> None:
    records = steps(*[(0, 20)] * 40)
    assert waits(records).slowest == 1
    assert waits(records, {}, unsure_ns=25 * MS).slowest is None
    assert waits(records, {0: 20 * MS, 1: 0}).slowest is None


def on(*hosts: str) -> dict[int, Clock]:
    """Have a rank on each of these hosts, whose clocks show the time of day."""
    return {rank: Clock(host, 0) for rank, host in enumerate(hosts)}


def seen(shifts: dict[int, int], count: int = 200, name: str = "all_reduce") -> Records:
    """Calls to which ranks come in any order, by clocks that are shifted."""
    draw = random.Random(1)
    records: Records = {rank: [] for rank in shifts}
    for number in range(1, count + 1):
        came = [number * 30 + draw.expovariate(1) for _ in shifts]
        for each in call(number, *came, name=name):
            more = draw.randrange(MS // 2)
            arrival = each.arrival_ns + shifts[each.rank]
            one = each._replace(arrival_ns=arrival, duration_ns=each.duration_ns + more)
            records[each.rank].append(one)
    return records


def test_ranks_of_one_host_need_no_offset() -> None:
    assert common_clock(seen({0: 0, 1: 0}), on("a", "a")) == ({0: 0, 1: 0}, 0)
    assert common_clock({}, {}) == ({}, 0)


def test_the_offset_of_another_host_is_found_within_what_it_says() -> None:
    shifts = {0: 0, 1: 0, 2: 17 * HOUR, 3: -HOUR}
    by_rank, unsure_ns = common_clock(seen(shifts), on(*"aabc"))
    assert unsure_ns < 2 * MS
    for rank, shift in shifts.items():
        assert abs(by_rank[rank] + shift) <= unsure_ns


def test_calls_that_a_rank_may_leave_early_bound_nothing() -> None:
    clocks = {0: Clock("a", 60 * HOUR), 1: Clock("b", 10 * HOUR)}
    by_day = {0: 60 * HOUR, 1: 10 * HOUR}
    without: Records = {0: [], 1: []}
    for records in (without, seen({0: 0, 1: 50 * HOUR}, name="broadcast")):
        by_rank, unsure_ns = common_clock(records, clocks)
        assert by_rank == by_day
        assert unsure_ns > 0


def test_calls_that_were_taken_for_one_are_left_out() -> None:
    """As where a rank that was killed has lost records, and made calls of their numbers later."""
    for downtime in (HOUR // 60, -HOUR // 60):
        records = seen({0: 0, 1: 3 * HOUR})
        for rank, others in seen({0: 0, 1: 3 * HOUR + downtime}, 3).items():
            records[rank] += [each._replace(group="a") for each in others]
        by_rank, unsure_ns = common_clock(records, on("a", "b"))
        assert abs(by_rank[1] + 3 * HOUR) <= unsure_ns < 2 * MS


def test_a_call_that_a_host_left_before_it_came_is_left_out() -> None:
    records = seen({0: 0, 1: 0, 2: HOUR})
    for number in range(1, 20):
        for rank, came in enumerate((0, 5000, 20)):
            at_ms = 9000 * number + came
            one = recorded(rank, number, at_ms, 1, ranks=(0, 1, 2), group="a")
            records[rank].append(one)
    by_rank, unsure_ns = common_clock(records, on(*"aab"))
    assert abs(by_rank[2] + HOUR) <= unsure_ns < 2 * MS


def test_a_call_without_a_line_of_the_users_has_no_site() -> None:
    """As where we initialise a worker."""
    (line,) = waits(by_rank(*call(1, 0, 5, file="", line=0))).lines
    assert line.site == ""
