"""The verdict on a job: which rank waits for which, and why, by pure functions."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from unisono.observe.stacks import Stack
from unisono.recording.status_page import CallKey, ObservedCall
from unisono.topology import named

_S = 1e9
_PATIENCE_S = 0.5  # a rank counts as late only if others have waited longer for it
_IDLE_PERCENT = 20.0  # of a core; checks for deaths and deadlines take less
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's process and calls, and the facts of its page."""

    rank: int
    pid: int
    condition: str
    calls: tuple[ObservedCall, ...] = ()
    made_ns: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    thread_percent: float | None = None
    stacks: list[Stack] | str | None = None  # of a rank on another host: its stacks, or why not

    @property
    def is_alive(self) -> bool:
        """Whether the process runs or is stopped."""
        return self.condition != "dead"

    @property
    def is_idle(self) -> bool:
        """Whether the rank's own thread hardly runs; False if that isn't known."""
        percent = self.thread_percent
        return self.condition == "sleeping" and percent is not None and percent < _IDLE_PERCENT


@dataclass(frozen=True, slots=True)
class State:
    """The current state of a rank."""

    kind: str
    call: ObservedCall | None
    is_inside: bool
    since_ns: int
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that makes others wait."""

    rank: int
    why: str
    waiters: tuple[int, ...] = ()
    waited_s: float = 0.0
    lost_s: float = 0.0
    came_last: int = 0
    n_calls: int = 0
    median_late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The cause of a job's delay."""

    kind: str
    text: str
    culprits: tuple[Culprit, ...] = ()
    states: Mapping[int, State] = field(default_factory=dict)


def judge(ranks: Sequence[Rank], now_ns: int, *, may_be_extra: bool = True) -> Verdict:
    """Return each rank's state, and the ranks that make others wait."""
    job = _JobFacts(ranks, now_ns)
    states = {rank: job.state(rank) for rank in sorted(job.ranks)}
    rules = [_gone, _mismatch, _extra, _late, _deadlock, _unseen]
    if not may_be_extra:  # stacks have shown that the rank alone in a call is only ahead
        rules.remove(_extra)
    for rule in rules:  # the first that holds decides
        found = rule(job)
        if found is not None:
            kind, text, culprits = found
            return Verdict(kind, text, job.with_costs(culprits), states)
    text = "no rank waits for another"
    if any(wait.ranks for wait in job.waits.values()):
        text = f"no rank has waited longer than {_PATIENCE_S:g} s"
    return Verdict("none", text, (), states)


_Found = tuple[str, str, list[Culprit]] | None


@dataclass(frozen=True, slots=True)
class _Wait:
    """The ranks that a rank waits for in a call: those with a page here, and those without."""

    call: ObservedCall
    ranks: tuple[int, ...]
    unseen: tuple[int, ...]


class _JobFacts:
    """The facts of a job for the rules."""

    def __init__(self, ranks: Sequence[Rank], now_ns: int) -> None:
        self.ranks = {rank.rank: rank for rank in ranks}
        self.now_ns = now_ns
        self.newest = {rank.rank: _newest(rank.calls) for rank in ranks}
        self.open = {rank.rank: innermost(rank.calls) for rank in ranks}
        self.waits = {rank: wait for rank in self.ranks if (wait := self._wait(rank)) is not None}

    def is_gone(self, rank: int) -> bool:
        return self.ranks[rank].condition in ("dead", "stopped")

    def _wait(self, rank: int) -> _Wait | None:
        """Return a rank's wait; of several, the one in which most ranks are missing."""
        if not self.ranks[rank].is_alive:
            return None
        # A call without a number was rejected by a hook, so it waits for no rank.
        waits = [self._wait_in(rank, call) for call in self.open[rank] if call.number]
        return max(waits, key=lambda wait: (len(wait.ranks), len(wait.unseen)), default=None)

    def _wait_in(self, rank: int, call: ObservedCall) -> _Wait:
        """Return a rank's wait in one call: for the members that haven't reached it."""
        others = [other for other in call.ranks if other != rank]

        def is_missing(other: int) -> bool:
            if self.newest[other].get(call.key, 0) < call.number:
                return True
            # A rank that died or was stopped within the call is missing, unless it shares the
            # waiting rank's process: a signal stops that one, too.
            is_apart = self.ranks[other].pid != self.ranks[rank].pid
            return is_apart and self.is_gone(other) and self._has(other, call, is_over=False)

        missing = [other for other in others if other in self.ranks and is_missing(other)]
        return _Wait(call, tuple(missing), tuple(each for each in others if each not in self.ranks))

    def waits_for_none(self, rank: int) -> bool:
        """Return whether a rank waits for no other, not even for one without a page here."""
        wait = self.waits.get(rank)
        if wait is None or not (wait.ranks or wait.unseen):
            return True
        # Once the call is over on another rank, ranks without a page have reached it, too.
        return not wait.ranks and any(
            self._has(other, wait.call, is_over=True) for other in self.ranks
        )

    def _has(self, rank: int, call: ObservedCall, *, is_over: bool) -> bool:
        """Return whether a rank is in a call, or if `is_over` whether it has left that call."""
        return any(
            (each.key, each.number, bool(each.end_ns)) == (call.key, call.number, is_over)
            for each in self.ranks[rank].calls
        )

    def waited_for(self, by: Iterable[int]) -> set[int]:
        """Return the ranks that any of the given ranks waits for."""
        return {other for rank in by if rank in self.waits for other in self.waits[rank].ranks}

    def waiters(self, culprit: int) -> tuple[int, ...]:
        """List the ranks that wait for the culprit, directly or through other ranks."""
        found = _reached(
            culprit,
            lambda new: {rank for rank, wait in self.waits.items() if new.intersection(wait.ranks)},
        )
        return tuple(sorted(found - {culprit}))

    def waited_s(self, ranks: Iterable[int]) -> float:
        """Return the longest wait of the given ranks."""
        # A call that began after `now_ns`, while the pages were being read, hasn't waited yet.
        begins = [self.waits[rank].call.begin_ns for rank in ranks if rank in self.waits]
        return max(self.now_ns - min(begins, default=self.now_ns), 0) / _S

    def have_waited(self, ranks: Iterable[int]) -> bool:
        return self.waited_s(ranks) >= _PATIENCE_S

    def state(self, rank: int) -> State:
        """Return the state of a rank: of its process, its wait, or its current or last call."""
        facts, opened, wait = self.ranks[rank], self.open[rank], self.waits.get(rank)
        call = wait.call if wait else (opened[-1] if opened else None)
        is_inside = call is not None
        call = call or max(facts.calls, key=lambda each: each.end_ns or each.begin_ns, default=None)
        since_ns = facts.made_ns
        if call is not None:  # an asynchronous call may be the last one, and have no end yet
            since_ns = call.begin_ns if is_inside else call.end_ns or call.begin_ns
        if self.is_gone(rank):
            return State(facts.condition, call, is_inside, since_ns)
        if wait and wait.ranks:
            return State("waits", call, is_inside, since_ns, wait.ranks)
        return State("in call" if is_inside else "computes", call, is_inside, since_ns)

    def with_costs(self, culprits: Sequence[Culprit]) -> tuple[Culprit, ...]:
        """Return culprits with their waiters and costs."""
        lost_s, lates, n_calls = _costs(self.ranks.values())
        found = []
        for culprit in culprits:
            rank = culprit.rank
            # The culprits of deadlocks and extra calls have their waiters already.
            waiters = culprit.waiters or self.waiters(rank)
            known = replace(
                culprit,
                waiters=waiters,
                waited_s=self.waited_s(waiters),
                lost_s=lost_s[rank] + sum(self.waited_s([each]) for each in waiters),
                came_last=len(lates[rank]),
                n_calls=n_calls,
                median_late_s=statistics.median(lates[rank] or [0.0]),
            )
            found.append(known)
        return tuple(found)


def innermost(calls: Sequence[ObservedCall]) -> list[ObservedCall]:
    """List the blocking calls that a rank is in: for each thread the one that began last."""
    found: dict[int, ObservedCall] = {}
    for call in sorted(calls, key=lambda each: each.begin_ns):
        if not call.end_ns and call.is_blocking:
            found[call.thread_id] = call
    return sorted(found.values(), key=lambda each: each.begin_ns)


def _newest(calls: Iterable[ObservedCall]) -> dict[CallKey, int]:
    """Return the number of a rank's last call in each group."""
    numbers: dict[CallKey, int] = {}
    for call in calls:
        numbers[call.key] = max(call.number, numbers.get(call.key, 0))
    return numbers


def _gone(job: _JobFacts) -> _Found:
    """Find ranks that are dead, and stopped ones that others wait for."""
    # A stopped rank may continue before another one needs it, but a dead one never does.
    dead = [rank for rank in job.ranks if not job.ranks[rank].is_alive]
    stopped = [rank for rank in job.waited_for(job.ranks) if job.ranks[rank].condition == "stopped"]
    for kind, ranks, what in (("dead", dead, "dead"), ("stopped", stopped, "stopped by a signal")):
        if ranks:
            text = f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} {what}"
            return kind, text, [Culprit(rank, f"is {what}") for rank in sorted(ranks)]
    return None


def _mismatch(job: _JobFacts) -> _Found:
    """Find ranks whose call has the number of another rank's call, but a different name."""
    for rank, opened in job.open.items():
        for call in opened:
            by_name = _names(job, call)
            if len(by_name) > 1 and job.have_waited([rank]):
                parts = [f"{named(ranks)} called {name}" for name, ranks in by_name.items()]
                text = f"call {call.number} of {call.group} isn't the same: {', '.join(parts)}"
                odd = [
                    Culprit(each, f"called {name}, unlike others")
                    for name, each in _odd_ones(by_name)
                ]
                return "mismatch", text, odd
    return None


def _odd_ones(ranks_of: Mapping[K, list[int]]) -> list[tuple[K, int]]:
    """Return the ranks of all calls but the most frequent one, the rarest call's first."""
    order = sorted(ranks_of.items(), key=lambda item: len(item[1]))
    fewest, most = len(order[0][1]), len(order[-1][1])
    # If every call was made by equally many ranks, any of them may be the wrong one.
    return [
        (call, rank)
        for call, ranks in order
        for rank in ranks
        if len(ranks) < most or fewest == most
    ]


def _names(job: _JobFacts, call: ObservedCall) -> dict[str, list[int]]:
    """Group ranks by the name of their call; a page without room for the name doesn't count."""
    found: dict[str, list[int]] = {}
    for rank in sorted(job.ranks):
        for each in job.ranks[rank].calls:
            if call.number and each.key == call.key and each.number == call.number and each.name:
                # The two ends of a message have different names, but that is not a mismatch.
                name = "a message" if each.name in ("send", "recv") else each.name
                found.setdefault(name, []).append(rank)
    return found


def _extra(job: _JobFacts) -> _Found:
    """Find a rank alone in a call that is new to the others, which are idle outside of calls."""
    waiting = [rank for rank, wait in job.waits.items() if wait.ranks]
    # In a job of two ranks, either may be wrong.
    if len(waiting) != 1 or len(job.ranks) < 3 or not job.have_waited(waiting):
        return None
    (alone,) = waiting
    others = [rank for rank in job.ranks if rank != alone]
    is_every = set(job.waits[alone].ranks) == set(others)
    are_idle = all(not job.open[rank] and job.ranks[rank].is_idle for rank in others)
    call = job.waits[alone].call
    if not is_every or not are_idle or any(_has_called(job.ranks[rank], call) for rank in others):
        return None
    text = (
        f"rank {alone} is alone in {call.name}, and the others are idle outside of calls: "
        "it made one call too many, or the others made one too few"
    )
    return "extra call", text, [Culprit(alone, f"is alone in {call.name}", (alone,))]


def _has_called(rank: Rank, call: ObservedCall) -> bool:
    """Return whether a rank was in that line before and may reach it again, as in a loop."""
    place = call.key, call.name, call.file, call.line
    return any((each.key, each.name, each.file, each.line) == place for each in rank.calls)


def _late(job: _JobFacts) -> _Found:
    """Find the ranks that others wait for, and that wait for no rank themselves."""
    sinks = [
        rank
        for rank in job.waited_for(job.ranks)
        if job.waits_for_none(rank) and job.have_waited(job.waiters(rank))
    ]
    if not sinks:
        return None
    sinks.sort(key=lambda rank: (-len(job.waiters(rank)), rank))
    waiters = {each for rank in sinks for each in job.waiters(rank)}
    text = f"{named(waiters)} wait{'s' if len(waiters) == 1 else ''} for {named(sinks)}"
    return "late", text, [Culprit(rank, _why_late(job, rank)) for rank in sinks]


def _why_late(job: _JobFacts, rank: int) -> str:
    """Return what a late rank does, as text."""
    if job.open[rank]:
        call = job.open[rank][-1]
        return f"is in {call.name}, where it waits for no rank"
    return f"is {'idle' if job.ranks[rank].is_idle else 'busy'} outside of calls"


def _deadlock(job: _JobFacts) -> _Found:
    """Find ranks that wait for each other, those of the rarest call first."""
    waiting = [rank for rank, wait in job.waits.items() if wait.ranks]
    cycle = [rank for rank in waiting if rank in _reached(rank, job.waited_for)]
    if not cycle or not job.have_waited(cycle):
        return None
    by_call: dict[tuple[str, int], list[int]] = {}
    for rank in sorted(waiting):
        call = job.waits[rank].call
        by_call.setdefault((f"{call.name} of {call.group}", call.number), []).append(rank)
    order = sorted(by_call.items(), key=lambda item: len(item[1]))
    parts = [f"{named(ranks)} in {name}" for (name, _), ranks in order]
    # Ranks that wait for the cycle are named in the text, but they aren't culprits.
    culprits = [
        Culprit(rank, f"is in {name}, and others elsewhere", tuple(r for r in cycle if r != rank))
        for (name, _), rank in _odd_ones(by_call)
        if rank in cycle
    ]
    return "deadlock", f"ranks wait for each other: {', '.join(parts)}", culprits


def _reached(start: int, after: Callable[[set[int]], set[int]]) -> set[int]:
    """Return the ranks that repeated use of `after` reaches from `start`."""
    found: set[int] = set()
    new = {start}
    while new:
        new = after(new) - found
        found |= new
    return found


def _unseen(job: _JobFacts) -> _Found:
    """Find ranks without a page here that others must be waiting for."""
    waits = {rank: wait for rank, wait in job.waits.items() if wait.unseen}
    if not waits or not job.have_waited(waits):
        return None
    unseen = {other for wait in waits.values() for other in wait.unseen}
    text = (
        f"{named(waits)} may wait for {named(unseen)}, without a page that could be read: on "
        "another host, or ended"
    )
    return "unseen", text, []  # nothing shows which of these ranks is late


def _costs(
    ranks: Iterable[Rank],
) -> tuple[defaultdict[int, float], defaultdict[int, list[float]], int]:
    """Return the seconds lost to each rank, its delays when it came last, and the call count."""
    arrivals: dict[tuple[CallKey, int], dict[int, ObservedCall]] = defaultdict(dict)
    for rank in ranks:
        for call in _without_inner(rank.calls):
            if call.number and call.is_blocking:
                arrivals[call.key, call.number][rank.rank] = call
    lost_s: defaultdict[int, float] = defaultdict(float)
    lates: defaultdict[int, list[float]] = defaultdict(list)
    n_calls = 0
    for calls in arrivals.values():
        first = next(iter(calls.values()))
        # Pages keep only the last calls, so some ranks may be unknown for older ones.
        if len(calls) < 2 or set(calls) != set(first.ranks):
            continue
        n_calls += 1
        last = max(calls, key=lambda rank: calls[rank].begin_ns)
        last_ns = calls[last].begin_ns
        others = [call for rank, call in calls.items() if rank != last]
        # A rank may have left before the last one arrived, such as the root of a broadcast.
        waits = [min(each.end_ns or last_ns, last_ns) - each.begin_ns for each in others]
        lost_s[last] += sum(waits) / _S
        lates[last].append((last_ns - max(each.begin_ns for each in others)) / _S)
    return lost_s, lates, n_calls


def _without_inner(calls: Sequence[ObservedCall]) -> Iterator[ObservedCall]:
    """Iterate over the calls that contain no other; `calls` are in the order of their starts."""
    for at, call in enumerate(calls):
        following = next((c for c in calls[at + 1 :] if c.thread_id == call.thread_id), None)
        if following is None or following.begin_ns >= (call.end_ns or math.inf):
            yield call
