"""One file of all ranks, by the documented format of Perfetto and Chrome."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.records import MS, call, recorded
from unisono.observe.perfetto import chrome_trace, jobs
from unisono.recording.records import CollectiveRecord
from unisono.recording.trace_file import RankTrace

Event = dict[str, Any]
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
Types = dict[str, type | tuple[type, ...]]
PLACE: Types = {"name": str, "pid": int, "tid": int, "ts": (int, float)}
SLICE: Types = {**PLACE, "dur": (int, float), "args": dict}
ARROW: Types = {**PLACE, "id": int, "cat": str, "bp": str}
NAME: Types = {"name": str, "pid": int, "args": dict}
KINDS = {"M": NAME, "X": SLICE, "s": ARROW, "f": ARROW}


def trace_of(rank: int, records: Sequence[CollectiveRecord], **facts: Any) -> RankTrace:
    known = {"job": "job", "boot": "a", "pid": 40 + rank}
    known |= {"world_size": 2, "wall_ns": 10**18, "monotonic_ns": 0}
    return RankTrace(**{"rank": rank, "records": records, **known, **facts})


def merged(*traces: RankTrace) -> list[Event]:
    """Merge, and hold the result to the format."""
    whole = json.loads(json.dumps(chrome_trace(jobs(traces))))
    assert whole["displayTimeUnit"] == "ms"
    events: list[Event] = whole["traceEvents"]
    for event in events:
        for key, kind in KINDS[event["ph"]].items():
            assert isinstance(event[key], kind), (key, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    events.sort(key=lambda each: each.get("ts", 0))  # as readers do
    of_thread: dict[tuple[int, int], list[float]] = {}
    for event in slices(events):  # in each thread every slice is within another, or beside it
        ends = of_thread.setdefault((event["pid"], event["tid"]), [])
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6
        ends.append(event["ts"] + event["dur"])
    return events


def slices(events: list[Event], name: str = "") -> list[Event]:
    return [each for each in events if each["ph"] == "X" and name in each["name"]]


def names(events: list[Event], kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e.get("tid", 0)): e["args"]["name"] for e in events if e["name"] == kind}


def test_each_rank_has_a_row_and_each_call_a_slice_with_its_facts() -> None:
    first, second = call(3, 1000, 1200, group="a")
    events = merged(trace_of(0, [first]), trace_of(1, [second]))
    assert sorted(names(events, "process_name").values()) == ["rank 0", "rank 1"]
    waiting, *calls = slices(events, "waiting"), *slices(events, "all_reduce")
    assert [(each["ts"], each["dur"]) for each in calls] == [(0, 201_000), (200_000, 1000)]
    assert calls[0]["args"] == {
        **{"number": 3, "group": "a", "bytes": 4, "dtype": "float32", "plane": "memory"},
        "line": "train.py:7",
    }
    (wait,) = waiting
    assert (wait["name"], wait["ts"], wait["dur"]) == ("waiting for rank 1", 0, 200_000)
    assert (wait["pid"], wait["tid"]) == (calls[0]["pid"], calls[0]["tid"])


def test_an_arrow_leads_from_each_wait_to_the_call_that_ended_it() -> None:
    records = [call(1, 0, 200, 100), call(2, 350, 300, 300)]
    events = merged(*(trace_of(rank, each) for rank, each in enumerate(zip(*records, strict=True))))
    begins, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert begins.keys() == ends.keys()
    rows = {pid: name for (pid, _), name in names(events, "process_name").items()}
    found = [(rows[e["pid"]], rows[ends[e["id"]]["pid"]], ends[e["id"]]) for e in begins.values()]
    assert [(out, into, e["ts"]) for out, into, e in sorted(found, key=lambda each: each[:2])] == [
        *(("rank 0", "rank 1", 200_000), ("rank 1", "rank 0", 350_000)),
        *(("rank 2", "rank 0", 350_000), ("rank 2", "rank 1", 200_000)),
    ]
    waiting = {(e["pid"], e["tid"], e["ts"]) for e in slices(events, "waiting for")}
    assert waiting == {(e["pid"], e["tid"], e["ts"]) for e in begins.values()}
    calls = {(e["pid"], e["tid"], e["ts"]) for e in slices(events, "all_reduce")}
    assert calls >= {(e["pid"], e["tid"], e["ts"]) for e in ends.values()}


def test_calls_that_overlap_in_a_thread_get_rows_of_their_own() -> None:
    records = [
        *(recorded(0, 1, 0, 100), recorded(0, 2, 10, 20, name="barrier")),
        *(recorded(0, 3, 50, 100, name="gather"), recorded(0, 4, 0, 5, thread_id=7, error="no")),
    ]
    events = merged(trace_of(0, records))
    rows = {each["name"]: each["tid"] for each in slices(events)}
    threads = names(events, "thread_name")
    assert len(threads) == 3
    assert rows["barrier"] != rows["gather"]
    errors = [each["args"]["error"] for each in slices(events) if "error" in each["args"]]
    assert errors == ["no"]


def test_a_wait_ends_where_a_call_within_begins() -> None:
    outer = [recorded(0, 1, 0, 310), recorded(1, 1, 300, 10)]
    inner = [recorded(0, 2, 100, 205, name="barrier"), recorded(1, 2, 301, 5, name="barrier")]
    events = merged(trace_of(0, [outer[0], inner[0]]), trace_of(1, [outer[1], inner[1]]))
    waits = [(each["ts"], each["dur"]) for each in slices(events, "waiting for rank 1")]
    assert waits == [(0, 100_000), (100_000, 201_000)]


def test_a_wait_begins_where_the_handle_is_waited_for() -> None:
    first, second = call(1, 0, 300)
    first = first._replace(overlap_ns=200 * MS)
    beside, across = (recorded(0, 1, 50, 100, group=name, ranks=(0,)) for name in "ab")
    across = across._replace(arrival_ns=190 * MS, duration_ns=20 * MS)
    for more, expected in (([], (200_000, 100_000)), ([beside], (200_000, 100_000))):
        events = merged(trace_of(0, [first, *more]), trace_of(1, [second]))
        (wait,) = slices(events, "waiting for rank 1")
        assert (wait["ts"], wait["dur"]) == expected
    events = merged(trace_of(0, [first, across]), trace_of(1, [second]))
    assert [each["dur"] for each in slices(events, "waiting")] == [0]
    assert first.duration_ns == 301 * MS


def test_ranks_of_other_hosts_are_put_on_one_clock() -> None:
    first, second = call(1, 1000, 1200)
    shift = 10**9 * MS
    away = recorded(1, 1, 1200 + 10**9, 1)
    events = merged(trace_of(0, [first]), trace_of(1, [away], boot="b", monotonic_ns=shift))
    by_rank = {each["pid"]: each["ts"] for each in slices(events, "all_reduce")}
    assert abs(by_rank[2] - by_rank[1] - 200_000) <= 101_000  # the middle of what is possible
    assert second.arrival_ns != away.arrival_ns


def test_a_rank_that_moves_to_another_host_is_put_there_by_the_time_of_day() -> None:
    """Whose clock shows less, so that what it does there seems to be first."""
    first = [call(number, 100 * number, 100 * number) for number in range(1, 6)]
    second = [call(n, 60_000 + 100 * n, 60_000 + 100 * n + 50) for n in range(1, 10)]
    away_ms = 90_000
    on_a, on_b = first[:3], [each[1] for each in second]  # it was killed, and has lost the last
    moved = [each._replace(arrival_ns=each.arrival_ns - away_ms * MS) for each in on_b]
    traces = [
        trace_of(0, [each[0] for each in (*first, *second)]),
        trace_of(1, [each[1] for each in on_a]),
        trace_of(1, moved, boot="b", monotonic_ns=-away_ms * MS, pid=99),
    ]
    (job,) = jobs(traces)
    found = job.waits()
    assert found.calls == 3 + 9
    assert found.watched_s == pytest.approx(60.851)
    assert found.waited_s[0] == pytest.approx(9 * 0.05)
    begins = sorted(each["ts"] for each in slices(merged(*traces), "all_reduce"))
    assert (begins[0], begins[-1]) == (0, 60_850_000)


def test_jobs_of_one_folder_are_told_apart() -> None:
    first, second = call(1, 0, 5)
    later = [trace_of(rank, [each], job="later") for rank, each in enumerate(call(1, 50, 60))]
    traces = [trace_of(0, [first]), trace_of(1, [second]), *later]
    assert [(job.name, job.world_size) for job in jobs(traces)] == [("job", 2), ("later", 2)]
    rows = names(merged(*traces), "process_name").values()
    assert "rank 1 of 2, job later" in rows
    assert len(set(rows)) == 4


def test_ranks_that_name_their_job_by_their_host_are_one_job() -> None:
    names = ("train.py-4", "train.py-9")
    (job,) = jobs([trace_of(rank, [], job=name) for rank, name in enumerate(names)])
    assert set(job.records) == {0, 1}
