"""One clock for all ranks: those of a host share it, others are compared by their calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.observe.waits import Meeting
from unisono.recording import CollectiveRecord


@dataclass(frozen=True, slots=True)
class Moment:
    """Where and when a rank read its clocks."""

    host: str
    wall_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True)
class Offsets:
    """What makes the clocks of all hosts one."""

    by_host: dict[str, int]
    unsure_ns: int


# What no rank leaves before the last one has come.
_MEETS = frozenset(
    {
        *("all_gather", "all_reduce", "all_reduce_", "all_to_all", "barrier", "gradients"),
        *("all_gather_tensors_with_shapes", "reduce_scatter", "new_group"),
    }
)
_Span = tuple[int, int]  # when the last rank of a host came to a call, and the first one left it


def offsets(
    moments: Sequence[Moment],
    met: Iterable[Meeting],
    host_of: Callable[[CollectiveRecord], str],
) -> Offsets:
    """Work out what makes the clocks of all hosts one: that of the first one."""
    # No rank can leave a call that all have to come to before the last one has come. So each of
    # those calls bounds the difference of two clocks from both sides, and many calls bound it to
    # less than a round between the hosts. Hosts without such a call are compared by the time of
    # day.
    if not moments:
        return Offsets({}, 0)
    names = list(dict.fromkeys(each.host for each in moments))
    first = names[0]
    hosts = {first: (0, 0)}  # offset, and how far it may be off
    spans = _by_host(met, host_of) if len(names) > 1 else {}
    ahead = deque([first])
    while ahead and len(hosts) < len(names):
        known = ahead.popleft()
        for other, bounds in _bounds(known, spans.get(known, ()), hosts).items():
            middle, unsure = _middle(*_agreeing(bounds))
            hosts[other] = (hosts[known][0] + middle, hosts[known][1] + unsure)
            ahead.append(other)
    wall = _by_time_of_day(moments)
    by_host = {
        host: hosts[host][0] if host in hosts else wall[host] - wall[first] for host in names
    }
    strangers = [_DAY_NS for host in names if host not in hosts]
    return Offsets(by_host, max([0, *strangers, *(each[1] for each in hosts.values())]))


_DAY_NS = 10_000_000  # how far apart hosts that ask the time of a server usually are
_DRIFT = 1e-4  # how much faster than another a clock may go; crystals do by half of it


def _by_host(
    met: Iterable[Meeting], host_of: Callable[[CollectiveRecord], str]
) -> dict[str, list[dict[str, _Span]]]:
    """Give the calls of each host, each with the spans of all of its hosts by their own clocks."""
    found: dict[str, list[dict[str, _Span]]] = {}
    for meeting in met:
        spans = dict(_spans(meeting, host_of))
        for host in spans if len(spans) > 1 else ():
            found.setdefault(host, []).append(spans)
    return found


def _spans(
    meeting: Meeting, host_of: Callable[[CollectiveRecord], str]
) -> Iterator[tuple[str, _Span]]:
    if next(iter(meeting.records.values())).name not in _MEETS:
        return
    ranks: dict[str, list[int]] = {}
    for rank, record in meeting.records.items():
        ranks.setdefault(host_of(record), []).append(rank)
    for host, here in ranks.items():
        arrival, end = max(map(meeting.arrival_ns, here)), min(map(meeting.end_ns, here))
        if arrival <= end and not any(meeting.records[rank].error for rank in here):
            yield host, (arrival, end)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What one call says of two clocks: the least and the most to add to the second one."""

    at_ns: int  # by the first clock
    low: int
    high: int

    def beyond(self, offset: int) -> int:
        """Say how far an offset is from what is possible."""
        return max(self.low - offset, offset - self.high, 0)


def _bounds(
    known: str, calls: Iterable[Mapping[str, _Span]], hosts: Mapping[str, object]
) -> dict[str, list[_Bounds]]:
    """Give by host, of those whose offset isn't known, what each of the calls says."""
    found: dict[str, list[_Bounds]] = {}
    for spans in calls:
        arrival, end = spans[known]
        for host, (its_arrival, its_end) in spans.items():
            if host not in hosts:
                bounds = _Bounds(arrival, arrival - its_end, end - its_arrival)
                found.setdefault(host, []).append(bounds)
    return found


def _agreeing(bounds: Sequence[_Bounds]) -> tuple[int, int]:
    """Return the least and the most that calls allow, without those that contradict most others."""
    # These are no one call: a rank that was killed may have lost records, and another's number has
    # come to be theirs. Clocks that drift contradict each other too, by little.
    offset = _most_common(bounds)
    agreeing = sorted(each.at_ns for each in bounds if not each.beyond(offset))
    middle_ns = agreeing[len(agreeing) // 2]
    kept = [each for each in bounds if each.beyond(offset) <= _DRIFT * abs(each.at_ns - middle_ns)]
    return max(each.low for each in kept), min(each.high for each in kept)


def _most_common(bounds: Sequence[_Bounds]) -> int:
    """Return an offset that as many calls as possible allow."""
    lows, highs = sorted(each.low for each in bounds), sorted(each.high for each in bounds)
    best, most, n_over = lows[0], 0, 0
    for n_begun, low in enumerate(lows, 1):
        while highs[n_over] < low:
            n_over += 1
        if n_begun - n_over > most:
            best, most = low, n_begun - n_over
    return best


def _middle(low: int, high: int) -> tuple[int, int]:
    """Return the middle, and how far it may be off: clocks that drift leave no room between."""
    return (low + high) // 2, abs(high - low) // 2


def _by_time_of_day(moments: Iterable[Moment]) -> dict[str, int]:
    readings: dict[str, list[int]] = {}
    for each in moments:
        readings.setdefault(each.host, []).append(each.wall_ns - each.monotonic_ns)
    return {host: sorted(all_of)[len(all_of) // 2] for host, all_of in readings.items()}
