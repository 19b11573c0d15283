"""Who came last, and how long the others waited: worked out from what all ranks have recorded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.recording import CollectiveRecord

FLOOR_NS = 1_000_000
"""Who comes later by less than this costs nobody time: ranks are never quite equal."""
FLOOR_SHARE = 0.05
"""The same as a share of the time since that rank's last call."""
_STEPS = 100  # whose last rank is counted
_LEAST_LOSS = 0.05  # of the time that was watched, for a rank to be named
_SET_UP = "initialize"  # to which processes come as they start: it names nobody
_LARGE_NS, _LARGE_SHARE = 50_000_000, 0.2  # more than a machine's hiccup
_LARGE_ONES = 3  # as many of them name a rank
_MOST = 0.8  # of the large ones
_CHANCE = 1e-4  # that equal ranks look as unequal

Records = Mapping[int, Sequence[CollectiveRecord]]
Key = tuple[int, int, int]  # which group, which context of it, which call


@dataclass(frozen=True, slots=True)
class Meeting:
    """One call, as each rank of its group has made it."""

    records: dict[int, CollectiveRecord]
    offsets: Mapping[int, int]
    last: int = field(init=False)
    """The rank that came last."""
    last_ns: int = field(init=False)
    """When it came, on the common clock."""

    def __post_init__(self) -> None:
        last = _last_of(self)  # once: each rank of the call asks for it
        object.__setattr__(self, "last", last)
        object.__setattr__(self, "last_ns", self.arrival_ns(last))

    def arrival_ns(self, rank: int) -> int:
        """Say when a rank came, on the common clock."""
        return self.records[rank].arrival_ns + self.offsets.get(rank, 0)

    def end_ns(self, rank: int) -> int:
        """Say when a rank was done, on the common clock."""
        return self.arrival_ns(rank) + self.records[rank].duration_ns

    def wait_begin_ns(self, rank: int) -> int:
        """Say when a rank had nothing else to do, on the common clock."""
        # That is when it came, or when it began to wait for the handle of a call
        # that it had started.
        return self.arrival_ns(rank) + self.records[rank].overlap_ns

    def waited_ns(self, rank: int) -> int:
        """Say how long a rank waited for the last one."""
        # A rank that was done before the last one came didn't wait for it, such as
        # the root of a broadcast.
        end_ns = self.end_ns(rank)
        if end_ns + FLOOR_NS < self.last_ns:  # by more than clocks are off
            return 0
        return max(min(self.last_ns, end_ns) - self.wait_begin_ns(rank), 0)


def _last_of(meeting: Meeting) -> int:
    return max(meeting.records, key=meeting.arrival_ns)


def meetings(ranks: Records, offsets: Mapping[int, int] | None = None) -> list[Meeting]:
    """Find the calls that every rank of their group has recorded."""
    # Those of a group of one rank are left out, but for a job of one.
    found: dict[Key, dict[int, CollectiveRecord]] = defaultdict(dict)
    groups = _Groups()
    for rank, records in sorted(ranks.items()):
        for key, record in _keyed(records, groups):
            found[key][rank] = record
    known = offsets or {}
    whole = [
        Meeting(records, known)
        for key, records in found.items()
        if len(records) == groups.sizes[key[0]]
        and len({_kind(each) for each in records.values()}) == 1
    ]
    return sorted(whole, key=lambda meeting: min(map(meeting.arrival_ns, meeting.records)))


class _Groups:
    """A number for each group: its ranks, of which there may be many, take long to hash."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}

    def number(self, group: str, ranks: Sequence[int]) -> int:
        """Return the number of a group."""
        number = self._numbers.setdefault((group, tuple(ranks)), len(self.sizes))
        if number == len(self.sizes):
            self.sizes.append(len(ranks))
        return number


def _keyed(
    records: Iterable[CollectiveRecord], groups: _Groups
) -> Iterable[tuple[Key, CollectiveRecord]]:
    """Tell calls of one number apart: a second context of the job counts from 1 again."""
    in_order = sorted(records, key=lambda each: each.arrival_ns)
    known: dict[tuple[str, int], int] = {}  # by the ids of ranks, which live as long as they
    contexts: dict[int, _Contexts] = defaultdict(_Contexts)
    for record in in_order:
        is_counted = len(record.ranks) > 1 or record.world_size == 1
        if record.number and record.duration_ns >= 0 and is_counted:
            place = (record.group, id(record.ranks))
            group = known.get(place)
            if group is None:
                group = known[place] = groups.number(record.group, record.ranks)
            yield (group, contexts[group].of(record.number), record.number), record


class _Contexts:
    """Which context of a rank and group a call is in, by its number."""

    # Two threads may begin calls so close to each other that the later one comes first by its
    # clock: a number below the last one is of a new context only if it was there before, or is
    # below all. A rank that is killed loses its last calls, so that to count each number by itself
    # would take those of its next context for them.

    def __init__(self) -> None:
        self._context = 0
        self._first = 0
        self._seen: set[int] = set()

    def of(self, number: int) -> int:
        """Count a call, in the order of arrivals."""
        if number < self._first or number in self._seen or not self._context:
            self._context += 1
            self._first = number
            self._seen.clear()
        self._seen.add(number)
        return self._context


def _kind(record: CollectiveRecord) -> str:
    return "message" if record.name in ("send", "recv") else record.name


@dataclass(frozen=True, slots=True)
class LineCost:
    """What one call in one line has cost, over all ranks and calls."""

    name: str
    site: str
    calls: int
    size_bytes: int
    total_s: float
    waiting_s: float
    lost_s: tuple[float, ...]

    @property
    def moving_s(self) -> float:
        """Seconds that all ranks together spent in it once the last one had come."""
        return self.total_s - self.waiting_s

    @property
    def slowest(self) -> int | None:
        """The rank that the others waited longest for; None where nobody waited."""
        worst = max(self.lost_s, default=0.0)
        return self.lost_s.index(worst) if worst else None


@dataclass(frozen=True, slots=True)
class Waits:
    """Which rank waited for which."""

    lost_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    in_calls_s: tuple[float, ...]
    lines: tuple[LineCost, ...]
    last: tuple[int, ...]
    calls: int
    watched_s: float
    slowest: int | None


@dataclass(frozen=True, slots=True)
class _Late:
    """A rank that came too late for a call."""

    rank: int
    late_ns: int
    gap_ns: int  # since its last call
    at: int  # which call it was


class _Timeline:
    """What was counted already, rank by rank: a call within another isn't counted twice."""

    def __init__(self, size: int) -> None:
        self._until = [-math.inf] * size
        self.total_ns = [0] * size

    def add(self, rank: int, begin_ns: int, end_ns: int) -> int:
        """Count what is new of an interval; they come in order of their begin."""
        new = int(max(end_ns - max(begin_ns, self._until[rank]), 0))
        self._until[rank] = max(self._until[rank], end_ns)
        self.total_ns[rank] += new
        return new

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(each / 1e9 for each in self.total_ns)


def waits(ranks: Records, offsets: Mapping[int, int] | None = None, unsure_ns: int = 0) -> Waits:
    """Work out which rank waited for which."""
    # What counts is when a rank came to a call, never how long it took there: a sum
    # takes as long on every rank, that of the slowest. A rank costs time that comes later than
    # another by more than 1 ms, and by more than 5 % of the time since its last call.
    # A rank is named where the others waited for it at least 5 % of the time, and it isn't chance:
    # in three calls by 50 ms and a fifth of its time since the last call, and others hardly ever as
    # long; or in so many calls by less that equal ranks differ as much once in ten thousand times.
    met = meetings(ranks, offsets)
    size = max(ranks, default=-1) + 1
    count = _Count(size, unsure_ns, {rank: _ends(ranks[rank], offsets, rank) for rank in ranks})
    for at, meeting in enumerate(met):
        count.add(at, meeting)
    count.add_up()
    begins = [min(map(each.arrival_ns, each.records)) for each in met]
    ends = [max(map(each.end_ns, each.records)) for each in met]
    watched_ns = max(ends) - min(begins) if met else 0
    recent = Counter(late.rank for late in count.late if late.at >= len(met) - _STEPS)
    return Waits(
        count.lost.seconds,
        count.waited.seconds,
        count.busy.seconds,
        tuple(sorted(count.line_costs(), key=lambda line: (-sum(line.lost_s), -line.total_s))),
        tuple(recent[rank] for rank in range(size)),
        len(met),
        watched_ns / 1e9,
        _slowest(count.late, size, watched_ns),
    )


def _ends(
    records: Iterable[CollectiveRecord], offsets: Mapping[int, int] | None, rank: int
) -> list[int]:
    offset = (offsets or {}).get(rank, 0)
    return sorted(each.arrival_ns + each.duration_ns + offset for each in records)


class _Line:
    """What is counted for one call in one line."""

    def __init__(self, size: int) -> None:
        self.calls = self.size_bytes = self.total_ns = self.waiting_ns = 0
        self.lost_ns = [0] * size
        self.sites: Counter[str] = Counter()


class _Count:
    """What is counted over all calls."""

    def __init__(self, size: int, unsure_ns: int, ends: Mapping[int, list[int]]) -> None:
        self.lost, self.waited, self.busy = _Timeline(size), _Timeline(size), _Timeline(size)
        self.late: list[_Late] = []
        self._size, self._unsure_ns, self._ends = size, unsure_ns, ends
        self._lines: dict[tuple[str, str], _Line] = {}
        self._stays: list[list[tuple[int, int, int, _Line]]] = [[] for _ in range(size)]

    def add(self, at: int, meeting: Meeting) -> None:
        """Count one call, in the order of first arrivals."""
        last = meeting.last
        record = meeting.records[last]
        site = f"{record.file}:{record.line}" if record.file else ""
        own = meeting.records[min(meeting.records)]
        line = self._lines.setdefault((own.name, f"{own.file}:{own.line}"), _Line(self._size))
        line.calls += 1
        line.sites[site] += 1
        line.size_bytes += record.size_bytes
        late_ns, came_ns = 0, meeting.last_ns
        for rank in meeting.records:
            begin, its_wait_ns = meeting.wait_begin_ns(rank), meeting.waited_ns(rank)
            late_ns = max(late_ns, its_wait_ns)
            self._stays[rank].append((begin, begin + its_wait_ns, meeting.end_ns(rank), line))
        gap_ns = self._since_last_call(last, came_ns)
        if late_ns > max(FLOOR_NS, FLOOR_SHARE * gap_ns, self._unsure_ns):
            new = self.lost.add(last, came_ns - late_ns, came_ns)
            line.lost_ns[last] += new
            if new > FLOOR_NS and record.name != _SET_UP:
                self.late.append(_Late(last, new, gap_ns, at))

    def add_up(self) -> None:
        """Count what ranks spent in all calls, once all have been added."""
        for rank, stays in enumerate(self._stays):
            for begin, until, end, line in sorted(stays, key=lambda stay: stay[0]):
                busy_ns = self.busy.add(rank, begin, end)
                line.total_ns += busy_ns
                line.waiting_ns += min(self.waited.add(rank, begin, until), busy_ns)

    def _since_last_call(self, rank: int, came_ns: int) -> int:
        ends = self._ends[rank]
        at = bisect_right(ends, came_ns)
        return came_ns - ends[at - 1] if at else 0

    def line_costs(self) -> Iterable[LineCost]:
        for (name, _), line in self._lines.items():
            ((site, _),) = line.sites.most_common(1)
            seconds = tuple(each / 1e9 for each in line.lost_ns)
            totals = (line.total_ns / 1e9, line.waiting_ns / 1e9)
            yield LineCost(name, site, line.calls, line.size_bytes, *totals, seconds)


def _slowest(late: Sequence[_Late], size: int, watched_ns: int) -> int | None:
    """Name the rank that costs time, where that is neither little nor chance."""
    lost = [0] * size
    for each in late:
        lost[each.rank] += each.late_ns
    worst = max(range(size), key=lambda rank: lost[rank], default=None)
    if worst is None or lost[worst] < _LEAST_LOSS * watched_ns or lost[worst] == 0:
        return None
    large = [
        each.rank for each in late if each.late_ns >= max(_LARGE_NS, _LARGE_SHARE * each.gap_ns)
    ]
    if large.count(worst) >= max(_LARGE_ONES, _MOST * len(large)):
        return worst
    mine = sum(each.rank == worst for each in late)
    return worst if size * _tail(mine, len(late), 1 / size) < _CHANCE else None


def _tail(least: int, count: int, chance: float) -> float:
    """Return the probability of at least so many of `count`, each with one probability."""
    if chance >= 1:
        return 1.0
    logs = (math.log(chance), math.log1p(-chance))
    return sum(
        math.exp(
            math.lgamma(count + 1)
            - math.lgamma(hit + 1)
            - math.lgamma(count - hit + 1)
            + hit * logs[0]
            + (count - hit) * logs[1]
        )
        for hit in range(least, count + 1)
    )
