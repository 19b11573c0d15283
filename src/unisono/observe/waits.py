"""Late ranks and waiting times, computed from the records of all ranks."""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unisono import plugins
from unisono.errors import ArgumentError
from unisono.recording.records import CollectiveRecord

FLOOR_NS = 1_000_000
"""Lateness below this doesn't count, because ranks are never quite equal."""
FLOOR_SHARE = 0.05
"""Nor does lateness below this share of the time since the late rank's last call."""
_STEPS = 100  # the last calls, whose late ranks are counted
_SET_UP = "initialize"  # at which lateness doesn't count: processes start at different times
# A rank is slow if it costs this share of the time, so many times as much as any other rank, and
# was late either by the large time in a few calls, or by any time in many calls.
_LEAST_LOSS = 0.05
_MORE_THAN_OTHERS = 4
_LARGE_NS = 50_000_000
_LARGE_ONES = 3
_SMALL_ONES = 20
_MOST_LINES = 5  # of a table
_BAR_WIDTH = 0.4
_WIDTH_INCHES, _HEIGHT_INCHES = 7, 4  # of a picture

Records = Mapping[int, Sequence[CollectiveRecord]]


class Meeting:
    """One call, with the record of each rank of its group, and the rank that arrived last."""

    def __init__(self, records: Mapping[int, CollectiveRecord], offsets: Mapping[int, int]) -> None:
        self.records = records
        self.offsets = offsets
        self.last: int = _last_of(self)
        self.last_ns: int = self.arrival_ns(self.last)

    def arrival_ns(self, rank: int) -> int:
        """Return a rank's arrival, on the common clock."""
        return self.records[rank].arrival_ns + self.offsets.get(rank, 0)

    def end_ns(self, rank: int) -> int:
        """Return a rank's end, on the common clock."""
        return self.arrival_ns(rank) + self.records[rank].duration_ns

    def wait_begin_ns(self, rank: int) -> int:
        """Return a rank's arrival, or the start of its wait for the handle of an async call."""
        return self.arrival_ns(rank) + self.records[rank].overlap_ns

    def waited_ns(self, rank: int) -> int:
        """Return the time that a rank waited for the last one."""
        # A rank that left before the last one arrived, such as the root of a broadcast, didn't wait
        # for the last one.
        end_ns = self.end_ns(rank)
        if end_ns + FLOOR_NS < self.last_ns:  # by more than the error of clocks
            return 0
        # A rank that began to wait for its handle only after the last arrival didn't wait either.
        return max(min(self.last_ns, end_ns) - self.wait_begin_ns(rank), 0)


def _last_of(meeting: Meeting) -> int:
    return max(meeting.records, key=meeting.arrival_ns)


def meetings(ranks: Records, offsets: Mapping[int, int] | None = None) -> list[Meeting]:
    """Find the calls that every rank of their group has recorded."""
    # Records of one call have the same group, context and number. Disjoint groups may have the same
    # name, so groups are told apart by their ranks, too.
    found: dict[tuple[int, int, int], dict[int, CollectiveRecord]] = defaultdict(dict)
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    # By the id of the ranks, which their record keeps alive: hashing them would take long.
    known: dict[tuple[str, int], int] = {}
    for rank, records in sorted(ranks.items()):
        contexts: dict[int, _Contexts] = defaultdict(_Contexts)
        for each in sorted(filter(_is_counted, records), key=lambda each: each.arrival_ns):
            key = each.group, id(each.ranks)
            if key not in known:
                known[key] = groups.setdefault((each.group, tuple(each.ranks)), len(groups))
            group = known[key]
            found[group, contexts[group].of(each.number), each.number][rank] = each
    whole = [
        Meeting(records, offsets or {})
        for records in found.values()
        if len(records) == len(next(iter(records.values())).ranks)
        and len({_kind(each) for each in records.values()}) == 1
    ]
    return sorted(whole, key=lambda meeting: min(map(meeting.arrival_ns, meeting.records)))


def _is_counted(record: CollectiveRecord) -> bool:
    # Calls without a number were rejected by a hook. Those of a group of one rank don't count,
    # except in a job of one.
    is_of_several = len(record.ranks) >= min(record.world_size, 2)
    return bool(record.number) and record.duration_ns >= 0 and is_of_several


class _Contexts:
    """The contexts of a group on one rank; each context counts its calls from 1."""

    # If two threads begin calls at almost the same time, the higher number may have the earlier
    # arrival. So a number below the last one is a new context's only if the current context has
    # already seen it, or began with a higher one.

    def __init__(self) -> None:
        self._context = self._first = 0
        self._seen: set[int] = set()

    def of(self, number: int) -> int:
        """Return the context of a call, given in the order of arrivals."""
        if number < self._first or number in self._seen or not self._seen:
            self._context += 1
            self._first = number
            self._seen.clear()
        self._seen.add(number)
        return self._context


def _kind(record: CollectiveRecord) -> str:
    return "message" if record.name in ("send", "recv") else record.name


class Clock(NamedTuple):
    """The clock of a rank's records."""

    boot: str
    """Ranks of one host share a clock."""
    to_wall_ns: int
    """The time of day minus the clock's."""


# No rank leaves one of these calls before the last rank has arrived.
_MEETS = frozenset([
    "all_gather", "all_gather_tensors_with_shapes", "all_reduce", "all_reduce_", "all_to_all",
    "barrier", "gradients", "new_group", "reduce_scatter",
])  # fmt: skip
_WALL_NS = 10_000_000  # usual error of the time of day between hosts that use a time server
_NARROWEST = 9  # calls used, those that bound the difference of two clocks best


def common_clock(ranks: Records, clocks: Mapping[int, Clock]) -> tuple[dict[int, int], int]:
    """Return each rank's offset to the time of day of the first rank's host, and the error."""
    # No rank leaves a call of `_MEETS` before the last rank's arrival. So each such call bounds the
    # difference of two hosts' clocks from both sides, and the shortest calls bound it best.
    hosts = {rank: clocks[rank].boot for rank in sorted(clocks)}
    # In reverse order, so that the dict keeps the clock of each host's first rank.
    walls = {clocks[rank].boot: clocks[rank].to_wall_ns for rank in sorted(clocks, reverse=True)}
    first, *others = dict.fromkeys(hosts.values()) or [""]
    bounds: dict[str, list[tuple[int, int]]] = {host: [] for host in others}
    offsets = {rank: walls[host] for rank, host in hosts.items()}
    for meeting in meetings(ranks, offsets) if others else ():
        spans = _spans(meeting, hosts)
        if first not in spans:
            continue
        for host in spans.keys() & bounds.keys():
            (arrival, end), (its_arrival, its_end) = spans[first], spans[host]
            # The clocks' difference is between arrival - its_end and end - its_arrival.
            width = end - arrival + its_end - its_arrival
            bounds[host].append((width, (arrival - its_end + end - its_arrival) // 2))
    unsure_ns = 0
    for host, found in bounds.items():
        # Without a common call, only the time of day is known. A width is twice the error.
        best = sorted(found)[:_NARROWEST] or [(2 * _WALL_NS, 0)]
        unsure_ns = max(unsure_ns, best[-1][0] // 2)
        # The low median is one of the values, so it stays an int.
        walls[host] += statistics.median_low([middle for _, middle in best])
    return {rank: walls[host] for rank, host in hosts.items()}, unsure_ns


def _spans(meeting: Meeting, hosts: Mapping[int, str]) -> dict[str, tuple[int, int]]:
    """Return for each host when its last rank arrived at a call, and when its first one left."""
    # Nothing for a call that a rank may leave before all have arrived, or that raised on a rank.
    if any(each.name not in _MEETS or each.error for each in meeting.records.values()):
        return {}
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank in meeting.records:
        ranks[hosts[rank]].append(rank)
    spans = {
        host: (max(map(meeting.arrival_ns, here)), min(map(meeting.end_ns, here)))
        for host, here in ranks.items()
    }
    # A host whose first rank left before its last one arrived has mixed up several calls.
    return {host: (arrival, end) for host, (arrival, end) in spans.items() if arrival <= end}


@dataclass(slots=True)
class LineCost:
    """The cost of one call in one line, over all ranks and calls."""

    name: str
    site: str
    lost_s: list[float]
    calls: int = 0
    size_bytes: int = 0
    total_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def moving_s(self) -> float:
        """Seconds that all ranks together spent in the call after the last rank's arrival."""
        return self.total_s - self.waiting_s

    @property
    def slowest(self) -> int | None:
        """The rank that the others waited longest for; None if none waited."""
        worst = max(self.lost_s, default=0.0)
        return self.lost_s.index(worst) if worst else None


@dataclass(eq=False)
class Watch:
    """Which rank waited for which; that of `watching` is empty until its block is over.

    The same on every rank.
    """

    lost_s: tuple[float, ...] = ()
    """By rank, seconds in which another rank waited for it."""
    waited_s: tuple[float, ...] = ()
    """By rank, seconds in which it waited for another."""
    in_calls_s: tuple[float, ...] = ()
    lines: tuple[LineCost, ...] = ()
    last: tuple[int, ...] = ()
    """By rank, how often it arrived last, and late, in the last hundred calls."""
    calls: int = 0
    watched_s: float = 0.0
    slowest: int | None = None
    """The rank that costs the others time; None if none stands out."""

    @property
    def by_line(self) -> dict[str, float]:
        """Seconds that the others waited, by file and line of the call, the most first."""
        found: dict[str, float] = {}
        for line in self.lines:
            if any(line.lost_s):
                found[line.site] = found.get(line.site, 0.0) + sum(line.lost_s)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw by rank the seconds that others waited for it, and that it waited.

        Args:
            path: of the picture; its suffix sets the format, as in ``"waits.png"``.

        Raises:
            ArgumentError: matplotlib isn't installed, or the file can't be written.
        """
        draw("plot()", {"": self}, path)

    def __str__(self) -> str:
        if not self.lost_s:
            return "nothing is known before the end of the block"
        columns = "rank   others waited for it   arrived last   it waited    in calls"
        lines = [self.headline, columns]
        lines += [
            f"{rank:4}{lost:21.3f} s{last:15}{waited:10.3f} s{busy:10.3f} s"
            for rank, (lost, last, waited, busy) in enumerate(
                zip(self.lost_s, self.last, self.waited_s, self.in_calls_s, strict=True)
            )
        ]
        for line in [each for each in self.lines if any(each.lost_s)][:_MOST_LINES]:
            where = f" at {Path(line.site).name}" if line.site else ""
            lost = sum(line.lost_s)
            lines.append(f"{lost:.3f} s for rank {line.slowest} in {line.name}{where}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Watch: slowest {self.slowest}, lost_s {self.lost_s}>"

    @property
    def headline(self) -> str:
        """The result in one line."""
        who = "no rank stands out" if self.slowest is None else f"rank {self.slowest} is slow"
        ranks = "1 rank" if len(self.lost_s) == 1 else f"{len(self.lost_s)} ranks"
        return f"{self.calls} calls of {ranks} in {self.watched_s:.3f} s: {who}"


class _Timeline:
    """Time by rank; where intervals overlap, time counts once."""

    def __init__(self, size: int) -> None:
        self._until = [-math.inf] * size
        self._total_ns = [0] * size

    def add(self, rank: int, begin_ns: int, end_ns: int) -> int:
        """Add an interval, and return how much of it is new; intervals come in order of starts."""
        new = int(max(end_ns - max(begin_ns, self._until[rank]), 0))
        self._until[rank] = max(self._until[rank], end_ns)
        self._total_ns[rank] += new
        return new

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(each / 1e9 for each in self._total_ns)


def waits(ranks: Records, offsets: Mapping[int, int] | None = None, unsure_ns: int = 0) -> Watch:
    """Compute which rank waited for which."""
    # Arrivals count, because durations show no difference: a sum is over on all ranks at once.
    met = meetings(ranks, offsets)
    size = max(ranks, default=-1) + 1
    sums = _Sums(size, unsure_ns)
    for at, meeting in enumerate(met):
        sums.add(at, meeting)
    sums.finish()
    begins = [min(map(each.arrival_ns, each.records)) for each in met]
    ends = [max(map(each.end_ns, each.records)) for each in met]
    watched_ns = max(ends) - min(begins) if met else 0
    recent = Counter(rank for rank, _, at in sums.late if at >= len(met) - _STEPS)
    lines = sorted(sums.lines.values(), key=lambda line: (-sum(line.lost_s), -line.total_s))
    return Watch(
        lost_s=sums.lost.seconds,
        waited_s=sums.waited.seconds,
        in_calls_s=sums.busy.seconds,
        lines=tuple(lines),
        last=tuple(recent[rank] for rank in range(size)),
        calls=len(met),
        watched_s=watched_ns / 1e9,
        slowest=_slowest(sums.late, watched_ns),
    )


class _Sums:
    """The sums over all calls."""

    def __init__(self, size: int, unsure_ns: int) -> None:
        self.lost, self.waited, self.busy = _Timeline(size), _Timeline(size), _Timeline(size)
        self.late: list[tuple[int, int, int]] = []  # rank, time lost in ns, index of the call
        self.lines: dict[tuple[str, str], LineCost] = {}
        self._unsure_ns = unsure_ns  # the error of the common clock
        self._ended_ns: dict[int, int] = {}  # by rank, the end of its last call
        self._intervals: list[list[tuple[int, int, int, LineCost]]] = [[] for _ in range(size)]

    def add(self, at: int, meeting: Meeting) -> None:
        """Add one call; calls come in the order of their first arrivals."""
        last, last_ns = meeting.last, meeting.last_ns
        record = meeting.records[last]
        site = f"{record.file}:{record.line}" if record.file else ""
        line = self.lines.get((record.name, site))
        if line is None:
            line = LineCost(record.name, site, [0.0] * len(self._intervals))
            self.lines[record.name, site] = line
        line.calls += 1
        line.size_bytes += record.size_bytes
        computed_ns = last_ns - self._ended_ns.get(last, last_ns)  # since that rank's last call
        late_ns = 0
        for rank in meeting.records:
            begin, waited_ns = meeting.wait_begin_ns(rank), meeting.waited_ns(rank)
            late_ns = max(late_ns, waited_ns)
            self._ended_ns[rank] = meeting.end_ns(rank)
            self._intervals[rank].append((begin, begin + waited_ns, meeting.end_ns(rank), line))
        if late_ns > max(FLOOR_NS, FLOOR_SHARE * computed_ns, self._unsure_ns):
            # The longest wait is the time lost; overlapping calls count once.
            new = self.lost.add(last, last_ns - late_ns, last_ns)
            line.lost_s[last] += new / 1e9
            if new > FLOOR_NS and record.name != _SET_UP:
                self.late.append((last, new, at))

    def finish(self) -> None:
        """Add the times of ranks in calls, once all calls have been added."""
        # Intervals are added in the order of their starts, unlike the calls.
        for rank, intervals in enumerate(self._intervals):
            for begin, waited_until, end, line in sorted(intervals, key=lambda each: each[0]):
                busy_ns = self.busy.add(rank, begin, end)
                line.total_s += busy_ns / 1e9
                # A call within another adds no time, and therefore no waiting.
                line.waiting_s += min(self.waited.add(rank, begin, waited_until), busy_ns) / 1e9


def _slowest(late: Iterable[tuple[int, int, int]], watched_ns: int) -> int | None:
    """Return the rank that repeatedly costs much of the time, far more than any other."""
    lost: Counter[int] = Counter()
    for rank, late_ns, _ in late:
        lost[rank] += late_ns
    ((worst, most), *others) = lost.most_common(2) or [(0, 0)]
    each = [late_ns for rank, late_ns, _ in late if rank == worst]
    is_often = len(each) >= _SMALL_ONES or sum(ns >= _LARGE_NS for ns in each) >= _LARGE_ONES
    is_much = most >= _LEAST_LOSS * watched_ns
    is_alone = most >= _MORE_THAN_OTHERS * sum(ns for _, ns in others)
    return worst if is_often and is_much and is_alone else None


def draw(what: str, found: Mapping[str, Watch], path: str | os.PathLike[str]) -> None:
    """Draw two bars for each rank: seconds that others waited for it, and that it waited."""
    # Loaded here, because nothing else needs matplotlib.
    try:
        make = plugins.load("matplotlib.figure:Figure")
    except ImportError as error:
        raise ArgumentError(
            f"{what} needs matplotlib, which can't be imported ({error}): pip install matplotlib, "
            "or print the table, which has the same figures"
        ) from error
    figure = make(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES * len(found)), layout="constrained")
    places = figure.subplots(len(found), squeeze=False)[:, 0]
    for axes, (name, each) in zip(places, found.items(), strict=True):
        _draw(axes, each)
        axes.set_title(f"{name}: {each.headline}" if name else each.headline)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # such as an unknown suffix
        raise ArgumentError(f"{what}: {os.fspath(path)} can't be written: {error}") from error


def _draw(axes: Any, found: Watch) -> None:
    ranks = range(len(found.lost_s))
    left, right = ([rank + side * _BAR_WIDTH / 2 for rank in ranks] for side in (-1, 1))
    axes.bar(left, found.lost_s, _BAR_WIDTH, label="others waited for it")
    axes.bar(right, found.waited_s, _BAR_WIDTH, label="it waited for others")
    axes.locator_params("x", integer=True, min_n_ticks=1)
    axes.set(xlim=(-0.5, len(ranks) - 0.5), xlabel="rank", ylabel="seconds")
    axes.legend()
