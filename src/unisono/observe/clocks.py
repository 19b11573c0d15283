"""One clock for all ranks: those of a host share it, others are compared by their calls."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.observe.waits import Meeting

__all__ = ("Moment", "Offsets", "offsets")


@dataclass(frozen=True, slots=True)
class Moment:
    """Where and when a rank read its clocks.

    Args:
        host: the same for ranks that share a monotonic clock, and for no others.
        wall_ns: time since 1970 in nanoseconds.
        monotonic_ns: the monotonic clock, read together with the other.
    """

    host: str
    wall_ns: int
    monotonic_ns: int


@dataclass(frozen=True, slots=True)
class Offsets:
    """What makes the clocks of all ranks one.

    Args:
        by_rank: nanoseconds to add to what a rank's clock has shown.
        unsure_ns: how far a rank's clock may be off then; 0 where all share one.
    """

    by_rank: dict[int, int]
    unsure_ns: int


# What no rank leaves before the last one has come.
_MEETS = frozenset(
    {
        *("all_gather", "all_reduce", "all_reduce_", "all_to_all", "barrier", "gradients"),
        *("all_gather_tensors_with_shapes", "reduce_scatter", "new_group"),
    }
)
_Hosts = dict[str, tuple[int, int]]  # offset and how far it may be off


def offsets(moments: Mapping[int, Moment], met: Iterable[Meeting]) -> Offsets:
    """Work out what makes the clocks of all ranks one: that of the first rank's host.

    Local, and pure. No rank can leave a call that all have to come to before the last one has come.
    So each of those calls bounds the difference of two clocks from both sides, and many calls bound
    it to less than a round between the hosts. Hosts without such a call are compared by the time
    of day.

    Args:
        moments: by rank, one reading of its clocks.
        met: calls that all ranks of a group have recorded, with no offset.
    """
    if not moments:
        return Offsets({}, 0)
    first = moments[min(moments)].host
    hosts: _Hosts = {first: (0, 0)}
    bounds = _bounds(moments, met) if len({each.host for each in moments.values()}) > 1 else {}
    ahead = deque([first])
    while ahead:
        known = ahead.popleft()
        for (one, other), between in bounds.items():
            if one == known and other not in hosts:
                middle, unsure = _middle(*between)
                hosts[other] = (hosts[known][0] + middle, hosts[known][1] + unsure)
                ahead.append(other)
    wall = _by_time_of_day(moments)
    by_rank = {
        rank: hosts[each.host][0] if each.host in hosts else wall[each.host] - wall[first]
        for rank, each in moments.items()
    }
    strangers = [_DAY_NS for each in moments.values() if each.host not in hosts]
    return Offsets(by_rank, max([0, *strangers, *(each[1] for each in hosts.values())]))


_NO_BOUND = 2**62
_DAY_NS = 10_000_000  # how far apart hosts that ask the time of a server usually are


def _bounds(
    moments: Mapping[int, Moment], met: Iterable[Meeting]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Give for two hosts the least and the most to add to the second one's clock."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for meeting in met:
        by_host = dict(_by_host(moments, meeting))
        for one, other in itertools.permutations(by_host, 2):
            low, high = found.get((one, other), (-_NO_BOUND, _NO_BOUND))
            (arrival, end), (its_arrival, its_end) = by_host[one], by_host[other]
            found[one, other] = max(low, arrival - its_end), min(high, end - its_arrival)
    return found


def _by_host(
    moments: Mapping[int, Moment], meeting: Meeting
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Give each host's last arrival and first end, by its own clock."""
    if next(iter(meeting.records.values())).name not in _MEETS:
        return
    ranks: dict[str, list[int]] = {}
    for rank in meeting.records:
        if rank in moments:
            ranks.setdefault(moments[rank].host, []).append(rank)
    for host, here in ranks.items():
        if not any(meeting.records[rank].error for rank in here):
            yield host, (max(map(meeting.arrival_ns, here)), min(map(meeting.end_ns, here)))


def _middle(low: int, high: int) -> tuple[int, int]:
    """Give the middle, and how far it may be off: clocks that drift leave no room between."""
    return (low + high) // 2, abs(high - low) // 2


def _by_time_of_day(moments: Mapping[int, Moment]) -> dict[str, int]:
    readings: dict[str, Sequence[int]] = {}
    for each in moments.values():
        readings[each.host] = [*readings.get(each.host, ()), each.wall_ns - each.monotonic_ns]
    return {host: sorted(all_of)[len(all_of) // 2] for host, all_of in readings.items()}
