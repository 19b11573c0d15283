"""One file for Perfetto or Chrome out of the traces of all ranks, on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.observe.clocks import Moment, offsets
from unisono.observe.trace_files import RankTrace
from unisono.observe.waits import Meeting, Waits, meetings, waits
from unisono.recording import CollectiveRecord

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobTrace:
    """What the ranks of one job have recorded."""

    name: str
    world_size: int
    traces: tuple[RankTrace, ...]

    @property
    def records(self) -> dict[int, list[CollectiveRecord]]:
        """The records by rank."""
        found: dict[int, list[CollectiveRecord]] = {}
        for trace in self.traces:
            found.setdefault(trace.rank, []).extend(trace.records)
        return found

    def on_one_clock(self) -> tuple[JobTrace, int]:
        """Put all records on the clock of the first rank's host."""
        # A rank may have been on several hosts, one after the other.
        traces = sorted(self.traces, key=lambda each: each.rank)
        by_day: dict[str, int] = {}  # what makes each clock the time of day
        for each in traces:
            by_day.setdefault(each.boot, each.wall_ns - each.monotonic_ns)
        if len(by_day) < 2:
            return self, 0
        rough = self._shifted(by_day)  # so that what a rank did is in order
        boots = {id(record): each.boot for each in rough.traces for record in each.records}
        moments = [
            Moment(each.boot, each.wall_ns, each.monotonic_ns + by_day[each.boot])
            for each in traces
        ]
        clock = offsets(moments, meetings(rough.records), lambda record: boots[id(record)])
        first_ns = by_day[traces[0].boot]
        shifts = {boot: by_day[boot] - first_ns + clock.by_host[boot] for boot in by_day}
        return self._shifted(shifts), clock.unsure_ns

    def _shifted(self, by_boot: Mapping[str, int]) -> JobTrace:
        traces = []
        for each in self.traces:
            more = by_boot[each.boot]
            records = [one._replace(arrival_ns=one.arrival_ns + more) for one in each.records]
            traces.append(replace(each, records=records))
        return replace(self, traces=tuple(traces))

    def waits(self) -> Waits:
        """Work out which rank waited for which."""
        job, unsure_ns = self.on_one_clock()
        return waits(job.records, None, unsure_ns)


def jobs(traces: Iterable[RankTrace]) -> list[JobTrace]:
    """Sort the traces of a folder by job."""
    # Ranks that had no way to know their job's name (it is one of their host's
    # then) are one job where none of them is there twice.
    named: dict[tuple[str, int], list[RankTrace]] = {}
    for trace in traces:
        named.setdefault((trace.job, trace.world_size), []).append(trace)
    sizes: dict[int, list[list[RankTrace]]] = {}
    for (_, size), of_job in named.items():
        sizes.setdefault(size, []).append(of_job)
    found = []
    for size, parts in sizes.items():
        ranks = [{trace.rank for trace in part} for part in parts]
        if len(parts) > 1 and sum(map(len, ranks)) == len(set().union(*ranks)):
            parts = [[trace for part in parts for trace in part]]
        found += [JobTrace(part[0].job, size, tuple(part)) for part in parts]
    return sorted(found, key=lambda job: min(trace.wall_ns for trace in job.traces))


def chrome_trace(found: Sequence[JobTrace]) -> dict[str, Any]:
    """Make what Perfetto and Chrome read, in their JSON format."""
    # A process for each rank, a thread for each of its threads; a slice for each call, and in it
    # one for the time until the last rank came, from which an arrow leads to the call of that rank.
    events: list[Event] = []
    rows = _Rows(len(found) > 1)
    epochs: dict[str, int] = {}  # of each host's monotonic clock
    for job, _ in (each.on_one_clock() for each in found):
        first = min(job.traces, key=lambda trace: trace.rank)
        epoch = epochs.setdefault(first.boot, first.wall_ns - first.monotonic_ns)
        epoch -= next(iter(epochs.values()))
        met = {
            id(record): meeting
            for meeting in meetings(job.records)
            for record in meeting.records.values()
        }
        for trace in job.traces:
            row = rows.of(job, trace)
            for record in sorted(trace.records, key=_outer_first):
                row.add(record, record.arrival_ns + epoch, met.get(id(record)))
    events = rows.events()
    zero_ns = min((each["ts"] for each in events if each["ph"] == "X"), default=0)
    for each in events:
        if each["ph"] != "M":
            each["ts"] = (each["ts"] - zero_ns) / 1e3
        if each["ph"] == "X":
            each["dur"] /= 1e3
    events.sort(key=lambda each: (each["ts"], _KINDS.index(each["ph"]), -each.get("dur", 0)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


_KINDS = "MXsf"  # names and slices, then where arrows begin and end: in the slices that are open


def _outer_first(record: CollectiveRecord) -> tuple[int, int]:
    return record.arrival_ns, -record.duration_ns


class _Lane:
    """A row in which every slice is within another, or beside it: readers take nothing else."""

    def __init__(self, pid: int, tid: int) -> None:
        self.pid, self.tid = pid, tid
        self.slices: list[Event] = []
        self._open: list[tuple[int, Event | None]] = []  # the end of a slice, and its waiting

    def takes(self, begin_ns: int, end_ns: int) -> bool:
        """Return whether a slice fits, none of which begins before those that are there."""
        while self._open and self._open[-1][0] <= begin_ns:
            self._open.pop()
        return not self._open or end_ns <= self._open[-1][0]

    def add(self, call: Event, waiting: Event | None) -> None:
        """Add a slice that fits, and what is in it."""
        if self._open and (outer := self._open[-1][1]) is not None:
            is_over = call["ts"] + call["dur"] <= outer["ts"]  # before the outer one was waited for
            if not is_over:
                outer["dur"] = min(outer["dur"], max(call["ts"] - outer["ts"], 0))
        self._open.append((call["ts"] + call["dur"], waiting))
        for each in (call, waiting):
            if each is not None:
                each.update(ph="X", pid=self.pid, tid=self.tid)
                self.slices.append(each)


class _Row:
    """A rank in a process: its threads, each with as many lanes as calls overlap."""

    def __init__(self, pid: int, name: str, rows: _Rows) -> None:
        self.pid, self.name = pid, name
        self._rows = rows
        self.lanes: dict[int, list[_Lane]] = {}

    def add(self, record: CollectiveRecord, begin_ns: int, meeting: Meeting | None) -> None:
        """Add a call, in the order of their begins."""
        lanes = self.lanes.setdefault(record.thread_id, [])
        duration_ns = max(record.duration_ns, 0)
        lane = next((each for each in lanes if each.takes(begin_ns, begin_ns + duration_ns)), None)
        if lane is None:
            lane = _Lane(self.pid, self._rows.new_thread(self))
            lanes.append(lane)
        waited_ns = 0 if meeting is None else meeting.waited_ns(record.rank)
        call: Event = {"name": record.name, "cat": "call", "ts": begin_ns, "dur": duration_ns}
        call["args"] = _args(record, waited_ns)
        waiting: Event | None = None
        if meeting is not None and waited_ns:
            name = f"waiting for rank {meeting.last}"
            ts = begin_ns + record.overlap_ns
            waiting = {"name": name, "cat": "waiting", "ts": ts, "dur": waited_ns}
            waiting["args"] = {"rank": meeting.last}
            self._rows.waits.append((waiting, meeting.records[meeting.last]))
        lane.add(call, waiting)
        self._rows.calls[id(record)] = call


def _args(record: CollectiveRecord, waited_ns: int) -> Event:
    return {
        "number": record.number,
        "group": record.group,
        "bytes": record.size_bytes,
        "dtype": record.dtype,
        "plane": record.plane,
        "line": f"{record.file}:{record.line}",
        "waited_us": waited_ns / 1e3,
        **({"error": record.error} if record.error else {}),
    }


class _Rows:
    """All rows, with numbers that no two processes or threads have in common."""

    def __init__(self, names_jobs: bool) -> None:
        self.calls: dict[int, Event] = {}  # by their records
        self.waits: list[tuple[Event, CollectiveRecord]] = []  # each with what it waited for
        self._names_jobs = names_jobs
        self._rows: dict[tuple[str, int, int, str, int], _Row] = {}
        self._threads = 0

    def of(self, job: JobTrace, trace: RankTrace) -> _Row:
        """Return the row of a rank."""
        key = (job.name, job.world_size, trace.rank, trace.host, trace.pid)
        if key not in self._rows:
            name = f"rank {trace.rank}"
            if self._names_jobs:
                name += f" of {job.world_size}, job {job.name}"
            self._rows[key] = _Row(len(self._rows) + 1, name, self)
        return self._rows[key]

    def new_thread(self, row: _Row) -> int:
        """Return a thread's number: a row's first has the row's own."""
        if not any(row.lanes.values()):
            return row.pid
        self._threads += 1
        return _FIRST_THREAD + self._threads

    def events(self) -> list[Event]:
        """Return all names, slices and arrows, in nanoseconds."""
        shown = [event for row in self._rows.values() for event in _events(row)]
        return [*shown, *self._arrows()]

    def _arrows(self) -> Iterator[Event]:
        """Lead from each wait to the call that ended it."""
        for number, (waiting, record) in enumerate(self.waits, 1):
            if waiting["dur"]:
                for ph, place in (("s", waiting), ("f", self.calls[id(record)])):
                    at = {key: place[key] for key in ("ts", "pid", "tid")}
                    yield {"ph": ph, "bp": "e", "id": number, **_ARROW, **at}


_ARROW = {"name": "waits for", "cat": "waiting"}
_FIRST_THREAD = 1_000_000  # no row has such a number


def _events(row: _Row) -> Iterator[Event]:
    def named(what: str, tid: int, **args: Any) -> Event:
        place = {"pid": row.pid, "tid": tid, "ts": 0, "dur": 0}
        return {"ph": "M", "name": what, **place, "args": args}

    yield named("process_name", row.pid, name=row.name)
    yield named("process_sort_index", row.pid, sort_index=row.pid)
    for thread, lanes in row.lanes.items():
        for number, lane in enumerate(lanes):
            more = f", calls that overlap {number}" if number else ""
            yield named("thread_name", lane.tid, name=f"thread {thread}{more}")
            yield from lane.slices
