"""Stacks of the ranks that make others wait, each asked for once in a place.

To ask a rank interrupts what waits in C there, so a view that looks each second mustn't.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unisono.observe import stacks
from unisono.observe.hosts import stacks_elsewhere
from unisono.observe.jobs import Job, Seen
from unisono.observe.stacks import Stack
from unisono.observe.verdict import Verdict

_ANSWER_S = 0.3
_AGAIN_S = 5.0  # one that hasn't answered


def ask(
    job: Job, ranks: Sequence[Seen], timeout_s: float, *, all_threads: bool = False
) -> dict[int, list[Stack] | str]:
    """Ask ranks for their stacks, on whatever host they are."""
    here = {
        each.rank.rank: (each.facts, each.rank.condition == "stopped")
        for each in ranks
        if each.is_here
    }
    far = [each.rank.rank for each in ranks if not each.is_here]
    found = stacks.of_ranks(here, timeout_s, all_threads=all_threads)
    return {**found, **stacks_elsewhere(job, far, timeout_s, all_threads=all_threads)}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank has told."""

    stacks: list[Stack] | str
    at_s: float
    place: tuple[object, ...]


class Asked:
    """The ranks that have been asked, and what they have told."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Answer] = {}

    def stacks(self, job: Job, verdict: Verdict, wanted: Iterable[int]) -> dict[int, Answer]:
        """Give the stacks of ranks; ask those that have made or left a call since the last time."""
        seen = {each.rank.rank: each for each in job.ranks}
        living = [rank for rank in wanted if seen[rank].rank.condition != "dead"]
        places = {rank: _place(seen[rank], verdict) for rank in living}
        now_s = time.monotonic()
        known = {rank: self._known.get((job.name, rank)) for rank in living}
        new = [rank for rank, each in known.items() if not _is_good(each, places[rank], now_s)]
        for rank, told in ask(job, [seen[rank] for rank in new], _ANSWER_S).items():
            self._known[job.name, rank] = Answer(told, time.monotonic(), places[rank])
        return {rank: self._known[job.name, rank] for rank in living}


def _place(seen: Seen, verdict: Verdict) -> tuple[object, ...]:
    state, call = verdict.states[seen.rank.rank], None
    if state.call is not None:
        call = (state.call.key, state.call.number, state.call.begin_ns)
    return seen.rank.pid, seen.facts.get("start_ticks"), state.kind, state.is_inside, call


def _is_good(known: Answer | None, place: tuple[object, ...], now_s: float) -> bool:
    """Return whether what is known of a rank still holds."""
    if known is None or known.place != place:
        return False
    return not isinstance(known.stacks, str) or now_s - known.at_s < _AGAIN_S
