"""Reports of ``unisono top`` and ``unisono where``: jobs, verdicts and stacks as plain data."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.observe.jobs import ObservedJob, stacks_of
from unisono.observe.stacks import Frame, Stack, is_before, user_frame
from unisono.observe.verdict import Culprit, Rank, State, Verdict, judge

_S = 1e9
_MAX_RANKS_ASKED = 8  # for their stacks, in one report
_ANSWER_S = 0.3  # for ranks to write their stacks
_RETRY_S = 5.0  # before a rank that hasn't answered is asked again
# Verdicts on a wrong call: a culprit's position is then the line of its call, not a line within it.
_WRONG_CALLS = ("mismatch", "deadlock", "extra call")


@dataclass(frozen=True, slots=True)
class Answer:
    """Stacks of a rank, or why there are none, and the rank's state when it was asked."""

    stacks: list[Stack] | str
    at_s: float
    state: tuple[object, ...]


class StackCache:
    """The last stacks of each rank that has been asked for them."""

    # Asking a rank interrupts its waits in C. So a view that refreshes each second asks a rank only
    # once until that rank begins or ends a call.

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Answer] = {}  # by job and rank

    def stacks(
        self, job: ObservedJob, verdict: Verdict, wanted: Iterable[int]
    ) -> dict[int, Answer]:
        """Return the stacks of ranks; ask those whose call has changed since the last time."""
        living = {rank.rank: rank for rank in job.ranks if rank.is_alive}
        states = {rank: _call_state(living[rank], verdict) for rank in wanted if rank in living}
        stale, retried_s = [], time.monotonic() - _RETRY_S
        for rank, state in states.items():
            known = self._known.get((job.name, rank))
            # A rank that didn't answer may do so now, even in the same state.
            has_failed = known is not None and isinstance(known.stacks, str)
            if known is None or known.state != state or (has_failed and known.at_s <= retried_s):
                stale.append(living[rank])
        for rank, stacks in stacks_of(stale, _ANSWER_S).items():
            self._known[job.name, rank] = Answer(stacks, time.monotonic(), states[rank])
        return {rank: self._known[job.name, rank] for rank in states}


def _call_state(rank: Rank, verdict: Verdict) -> tuple[object, ...]:
    """Return a rank's process and call; its stacks are kept until one of them changes."""
    state, call = verdict.states[rank.rank], None
    if state.call is not None:
        call = (state.call.key, state.call.number, state.call.begin_ns)
    return rank.pid, rank.facts.get("start_ticks"), state.kind, state.is_inside, call


def reports(jobs: Sequence[ObservedJob]) -> dict[str, Any]:
    """Return the state of each rank of each job, and the ranks that make others wait."""
    # Of the ranks on this host, those that make others wait are asked for stacks, all of them after
    # an extra call.
    cache = StackCache()
    return {"host": socket.gethostname(), "jobs": [report_of(job, cache) for job in jobs]}


def facts_of(job: ObservedJob) -> dict[str, Any]:
    """Return a job's name, program, size and age, from its pages."""
    began_ns = min(rank.made_ns for rank in job.ranks)
    known = {key: job.facts.get(key, "") for key in ("program", "cwd", "backend", "model")}
    up_s = _age_s(began_ns, job.at_ns)
    return {"job": job.name, **known, "world_size": job.world_size, "up_s": up_s}


def _age_s(began_ns: int, at_ns: int) -> float:
    """Return an age in seconds at the start of a look; 0 if it began after that."""
    return max(at_ns - began_ns, 0) / _S


def report_of(job: ObservedJob, cache: StackCache) -> dict[str, Any]:
    """Return the state of each rank of a job, and the ranks that make others wait."""
    verdict = judge(job.ranks, job.at_ns)
    # Only stacks distinguish an extra call from a rank that is merely ahead. Asking for stacks
    # interrupts the ranks' waits, so this is done only for this verdict.
    if verdict.kind == "extra call" and _is_only_ahead(job, verdict, cache):
        verdict = judge(job.ranks, job.at_ns, may_be_extra=False)
    culprits = [each.rank for each in verdict.culprits[:_MAX_RANKS_ASKED]]
    answers = cache.stacks(job, verdict, culprits)
    return {
        **facts_of(job),
        "verdict": {"kind": verdict.kind, "text": verdict.text},
        "culprits": [
            {
                **asdict(each),
                "waiters": list(each.waiters),
                **_position(each, verdict, answers.get(each.rank)),
            }
            for each in verdict.culprits
        ],
        "ranks": [_rank(rank, verdict.states[rank.rank], job.at_ns) for rank in job.ranks],
        "elsewhere": list(job.elsewhere),
    }


def calls_of(job: ObservedJob) -> dict[int, str]:
    """Return the current call of each rank that is in one, as text."""
    states = judge(job.ranks, job.at_ns).states
    return {
        rank: f"{state.call.name} of {state.call.group}, call {state.call.number}"
        for rank, state in states.items()
        if state.is_inside and state.call is not None
    }


def _is_only_ahead(job: ObservedJob, verdict: Verdict, cache: StackCache) -> bool:
    """Return whether another rank's stack is before the line that the culprit has reached."""
    alone = verdict.culprits[0].rank  # an extra call has one culprit
    others = [rank.rank for rank in job.ranks if rank.rank != alone][:_MAX_RANKS_ASKED]
    answers = cache.stacks(job, verdict, [alone, *others])
    frames = {rank: _own_stack(answer) for rank, answer in answers.items()}
    return any(is_before(frames.get(rank, ()), frames.get(alone, ())) for rank in others)


def _own_stack(answer: Answer | None) -> tuple[Frame, ...]:
    """Return the stack of a rank's own thread; empty without an answer."""
    stacks = [] if answer is None or isinstance(answer.stacks, str) else answer.stacks
    return stacks[0].frames if stacks else ()


def _position(culprit: Culprit, verdict: Verdict, answer: Answer | None) -> dict[str, Any]:
    """Return a culprit's position: the line of its call, of its stack, or of its last call."""
    state, frames = verdict.states[culprit.rank], _own_stack(answer)
    user, call = user_frame(frames), state.call
    # What is wrong is then the call, whatever the rank's stack shows by now.
    is_wrong_call = verdict.kind in _WRONG_CALLS
    position: dict[str, Any] = {"file": "", "line": 0, "function": "", "from": ""}
    if user is not None and not (is_wrong_call and call is not None):
        position = {**user._asdict(), "from": "stack"}
    elif call is not None:
        source = "call" if is_wrong_call or state.is_inside else "last call"
        position |= {"file": call.file, "line": call.line, "from": source}
    return {
        **position,
        "no_stack": answer.stacks if answer and isinstance(answer.stacks, str) else None,
        "told_s": None if answer is None else time.monotonic() - answer.at_s,
        "stack": [frame._asdict() for frame in frames],
    }


def _rank(rank: Rank, state: State, now_ns: int) -> dict[str, Any]:
    """Return a rank's process, state and call as plain data."""
    call = state.call
    named = ("name", "group", "number", "size_bytes", "file", "line")
    return {
        "rank": rank.rank,
        "host": rank.facts.get("host", ""),
        "pid": rank.pid,
        "process": rank.condition,
        "is_idle": rank.is_idle,
        "cpu_percent": rank.cpu_percent,
        "memory_bytes": rank.memory_bytes,
        "state": state.kind,
        "waits_for": list(state.waits_for),
        "since_s": _age_s(state.since_ns, now_ns),
        "is_in_call": state.is_inside,
        "call": None if call is None else {key: getattr(call, key) for key in named},
    }
