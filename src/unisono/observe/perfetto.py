"""The traces of all ranks of a job on one clock, in one file for Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from unisono.observe.waits import Clock, Meeting, Watch, common_clock, meetings, waits
from unisono.recording.records import CollectiveRecord
from unisono.recording.trace_file import Event, RankTrace, args_of

_FIRST_THREAD = 1_000_000  # first thread id in a merged file; larger than any process id in it


@dataclass(frozen=True, slots=True)
class JobTrace:
    """The records of the ranks of one job, and their clocks."""

    name: str
    world_size: int
    records: dict[int, list[CollectiveRecord]]
    clocks: dict[int, Clock]

    def waits(self) -> Watch:
        """Compute which rank waited for which."""
        return waits(self.records, *common_clock(self.records, self.clocks))


def jobs(traces: Iterable[RankTrace]) -> list[JobTrace]:
    """Return the traces of a folder, by job."""
    named: dict[tuple[int, str], list[RankTrace]] = {}
    for each in traces:
        named.setdefault((each.world_size, each.job), []).append(each)
    ranks = [{each.rank for each in part} for part in named.values()]
    # Traces with the same world size and no rank in common are one job.
    if len({size for size, _ in named}) == 1 and sum(map(len, ranks)) == len(set().union(*ranks)):
        # Ranks that couldn't learn the name of their job use a name that their host gives
        # the job.
        named = {next(iter(named)): list(chain(*named.values()))}
    found = sorted(named.items(), key=lambda item: min(each.wall_ns for each in item[1]))
    return [_job(name, size, part) for (size, name), part in found]


def _job(name: str, size: int, traces: Iterable[RankTrace]) -> JobTrace:
    job = JobTrace(name, size, {}, {})
    for each in traces:
        to_wall_ns = each.wall_ns - each.monotonic_ns
        clock = job.clocks.setdefault(each.rank, Clock(each.boot, to_wall_ns))
        records = job.records.setdefault(each.rank, [])
        # Records of a rank that has moved to another host are converted to its first clock, by the
        # hosts' time of day.
        shift_ns = 0 if each.boot == clock.boot else to_wall_ns - clock.to_wall_ns
        records += [one._replace(arrival_ns=one.arrival_ns + shift_ns) for one in each.records]
    return job


def chrome_trace(job_traces: Sequence[JobTrace]) -> dict[str, Any]:
    """Build the JSON of all ranks: a process for each, a slice for each call, arrows for waits."""
    # A waiting slice in a call's slice lasts until the last rank arrived; an arrow leads from there
    # to that rank's call. Viewers sort by time; an enclosing slice must be listed
    # before the slices inside it.
    offsets = [common_clock(job.records, job.clocks)[0] for job in job_traces]
    begins = [
        record.arrival_ns + job_offsets[rank]
        for job, job_offsets in zip(job_traces, offsets, strict=True)
        for rank, records in job.records.items()
        for record in records
    ]
    zero_ns = min(begins, default=0)
    pids, tids = count(1), count(_FIRST_THREAD)
    events: list[Event] = []
    arrows: list[Event] = []
    for job, job_offsets in zip(job_traces, offsets, strict=True):
        suffix = f" of {job.world_size}, job {job.name}" if len(job_traces) > 1 else ""
        shifts = {rank: offset - zero_ns for rank, offset in job_offsets.items()}
        # A meeting is one call as matched across its ranks.
        met = {
            id(record): each
            for each in meetings(job.records, shifts)
            for record in each.records.values()
        }
        ranks = {
            rank: _RankEvents(next(pids), f"rank {rank}{suffix}", tids)
            for rank in sorted(job.records)
        }
        for rank, rank_events in ranks.items():
            in_order = sorted(
                job.records[rank], key=lambda each: (each.arrival_ns, -each.duration_ns)
            )
            for record in in_order:
                rank_events.add(record, record.arrival_ns + shifts[rank], met.get(id(record)))
            events += rank_events.events
        arrows += _arrows(ranks)
    for number, each in enumerate(arrows):
        each["id"] = number // 2  # an arrow is two events: its start and end
    return {"traceEvents": [*events, *arrows], "displayTimeUnit": "ms"}


@dataclass(slots=True)
class _Track:
    """One line of slices that are nested or follow each other: viewers accept no other overlap."""

    tid: int
    open: list[tuple[int, Event | None]] = field(default_factory=list)
    """The end of each unfinished slice, and the waiting slice in it."""

    def has_room(self, begin_ns: int, end_ns: int) -> bool:
        """Close the slices that have ended; return whether a new one fits into those left."""
        while self.open and self.open[-1][0] <= begin_ns:
            self.open.pop()
        return not self.open or end_ns <= self.open[-1][0]


class _RankEvents:
    """The events of one rank; a thread whose calls overlap has several tracks."""

    def __init__(self, pid: int, name: str, tids: Iterator[int]) -> None:
        self.events: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        ]
        self.calls: dict[int, Event] = {}  # by the ids of their meetings, which the caller keeps
        self.waits: list[tuple[Event, Meeting]] = []
        self._pid, self._tids = pid, tids
        self._tracks: dict[int, list[_Track]] = {}

    def add(self, record: CollectiveRecord, begin_ns: int, meeting: Meeting | None) -> None:
        """Add a call; calls must be added in the order of their starts."""
        end_ns = begin_ns + max(record.duration_ns, 0)  # -1 if the call wasn't over
        track = self._track(record.thread_id, begin_ns, end_ns)
        args = {**args_of(record), "number": record.number}
        call = self._slice(track, record.name, "call", begin_ns, end_ns - begin_ns, args)
        outer = track.open[-1][1] if track.open else None
        # Slices may not overlap, so a waiting slice ends where an inner call begins; nothing is
        # left of it if that call began before the waiting.
        if outer is not None and call["ts"] + call["dur"] > outer["ts"]:
            outer["dur"] = min(outer["dur"], max(call["ts"] - outer["ts"], 0))
        waiting = None
        if meeting is not None:
            self.calls[id(meeting)] = call
            if waited_ns := meeting.waited_ns(record.rank):
                begin_ns += record.overlap_ns  # until then the rank worked instead of waiting
                name, args = f"waiting for rank {meeting.last}", {"rank": meeting.last}
                waiting = self._slice(track, name, "waiting", begin_ns, waited_ns, args)
                self.waits.append((waiting, meeting))
        track.open.append((end_ns, waiting))

    def _track(self, thread_id: int, begin_ns: int, end_ns: int) -> _Track:
        """Return a track of a thread with room for a slice; add one if there is none."""
        tracks = self._tracks.setdefault(thread_id, [])
        for track in tracks:
            if track.has_room(begin_ns, end_ns):
                return track
        track = _Track(next(self._tids))
        name = f"thread {thread_id}{f', overlapping calls, track {len(tracks)}' if tracks else ''}"
        named = {"ph": "M", "name": "thread_name", "pid": self._pid, "tid": track.tid}
        self.events.append({**named, "args": {"name": name}})
        tracks.append(track)
        return track

    def _slice(
        self, track: _Track, name: str, cat: str, begin_ns: int, duration_ns: int, args: Event
    ) -> Event:
        event = {"ph": "X", "name": name, "cat": cat, "pid": self._pid, "tid": track.tid}
        event |= {"ts": begin_ns / 1e3, "dur": duration_ns / 1e3, "args": args}
        self.events.append(event)
        return event


def _arrows(ranks: dict[int, _RankEvents]) -> Iterator[Event]:
    """Build an arrow, of two events, from each wait to the call that ended it."""
    for waiting, meeting in chain.from_iterable(each.waits for each in ranks.values()):
        # An inner call may have left nothing of a waiting slice, and then an arrow has no start.
        ends = {"s": waiting, "f": ranks[meeting.last].calls[id(meeting)]} if waiting["dur"] else {}
        for ph, end in ends.items():
            at = {key: end[key] for key in ("ts", "pid", "tid")}
            # "bp": "e" binds the end to the slice around it, instead of the next one.
            yield {"ph": ph, "bp": "e", "name": "waits for", "cat": "waiting", **at}
