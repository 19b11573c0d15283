"""Reports of ``unisono top`` and ``unisono where``: jobs, verdicts and stacks as plain data."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from unisono.observe import stacks
from unisono.observe.jobs import ObservedJob, Seen, stacks_of
from unisono.observe.stacks import Frame, Stack
from unisono.observe.verdict import Culprit, State, Verdict, judge

_S = 1e9
_MOST_ASKED = 8  # culprits whose stacks are asked for
_ANSWER_S = 0.3
_AGAIN_S = 5.0  # until a rank that hasn't answered is asked again


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's answer."""

    stacks: list[Stack] | str
    at_s: float
    place: tuple[object, ...]


class Asked:
    """The ranks that have been asked for stacks, and their answers."""

    # Asking a rank interrupts waits in C there, so a view that refreshes each second asks each rank
    # once in a place.

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Answer] = {}

    def stacks(
        self, job: ObservedJob, verdict: Verdict, wanted: Iterable[int]
    ) -> dict[int, Answer]:
        """Return the stacks of ranks; ask those whose call has changed since the last time."""
        seen = {each.rank.rank: each for each in job.ranks}
        living = [rank for rank in wanted if seen[rank].rank.condition != "dead"]
        places = {rank: _place_of(seen[rank], verdict) for rank in living}
        now_s = time.monotonic()
        known = {rank: self._known.get((job.name, rank)) for rank in living}
        new = [rank for rank, each in known.items() if not _is_good(each, places[rank], now_s)]
        for rank, told in stacks_of([seen[rank] for rank in new], _ANSWER_S).items():
            self._known[job.name, rank] = Answer(told, time.monotonic(), places[rank])
        return {rank: self._known[job.name, rank] for rank in living}


def _place_of(seen: Seen, verdict: Verdict) -> tuple[object, ...]:
    state, call = verdict.states[seen.rank.rank], None
    if state.call is not None:
        call = (state.call.key, state.call.number, state.call.begin_ns)
    return seen.rank.pid, seen.facts.get("start_ticks"), state.kind, state.is_inside, call


def _is_good(known: Answer | None, place: tuple[object, ...], now_s: float) -> bool:
    """Return whether a known answer still holds."""
    if known is None or known.place != place:
        return False
    return not isinstance(known.stacks, str) or now_s - known.at_s < _AGAIN_S


def reports(jobs: Sequence[ObservedJob]) -> dict[str, Any]:
    """Return the state of each rank of each job, and the ranks that make others wait."""
    # Of this host, it asks only ranks that make others wait, and the others of an extra call.
    asked = Asked()
    return {"host": socket.gethostname(), "jobs": [report_of(job, asked) for job in jobs]}


def facts_of(job: ObservedJob) -> dict[str, Any]:
    """Return a job's name, program, size and age, from its pages."""
    began_ns = min(each.rank.made_ns for each in job.ranks)
    known = {key: job.facts.get(key, "") for key in ("program", "cwd", "backend", "model")}
    up_s = max(job.at_ns - began_ns, 0) / _S
    return {"job": job.name, **known, "world_size": job.world_size, "up_s": up_s}


def report_of(job: ObservedJob, asked: Asked) -> dict[str, Any]:
    """Return the state of each rank of a job, and the ranks that make others wait."""
    now_ns, ranks = job.at_ns, [each.rank for each in job.ranks]
    verdict = judge(ranks, now_ns)
    if verdict.kind == "extra call" and _is_early(job, verdict, asked):
        verdict = judge(ranks, now_ns, is_early=True)
    seen = {each.rank.rank: each for each in job.ranks}
    culprits = [each.rank for each in verdict.culprits[:_MOST_ASKED]]
    answers = asked.stacks(job, verdict, culprits)
    return {
        **facts_of(job),
        "verdict": {"kind": verdict.kind, "text": verdict.text},
        "culprits": [
            {**_plain(each), **_place(each, verdict, answers.get(each.rank))}
            for each in verdict.culprits
        ],
        "ranks": [
            _rank(seen[rank], verdict.states[rank], now_ns) for rank in sorted(verdict.states)
        ],
        "elsewhere": list(job.elsewhere),
    }


def calls_of(job: ObservedJob) -> dict[int, str]:
    """Return the current call of each rank that is in one, as text."""
    states = judge([each.rank for each in job.ranks], job.at_ns).states
    return {
        rank: f"{state.call.name} of {state.call.group}, call {state.call.number}"
        for rank, state in states.items()
        if state.is_inside and state.call is not None
    }


def _is_early(job: ObservedJob, verdict: Verdict, asked: Asked) -> bool:
    """Return whether a rank has yet to reach the line where one is alone, by their stacks."""
    alone = verdict.culprits[0].rank
    others = [each.rank.rank for each in job.ranks if each.rank.rank != alone][:_MOST_ASKED]
    answers = asked.stacks(job, verdict, [alone, *others])
    frames = {rank: _own_stack(answer) for rank, answer in answers.items()}
    return any(stacks.is_before(frames.get(rank, ()), frames.get(alone, ())) for rank in others)


def _own_stack(answer: Answer | None) -> tuple[Frame, ...]:
    """Return the stack of a rank's own thread; empty without an answer."""
    told = answer.stacks if answer is not None else ""
    return told[0].frames if isinstance(told, list) and told else ()


def _place(culprit: Culprit, verdict: Verdict, answer: Answer | None) -> dict[str, Any]:
    """Return a culprit's position: the line of its call, of its stack, or of its last call."""
    state, frames = verdict.states[culprit.rank], _own_stack(answer)
    own, call = stacks.own_frame(frames), state.call
    is_of_calls = verdict.kind in ("mismatch", "deadlock", "extra call")
    place: dict[str, Any] = {"file": "", "line": 0, "function": "", "from": ""}
    if own is not None and not (is_of_calls and call is not None):
        place = {**_plain(own), "from": "stack"}
    elif call is not None:
        source = "call" if is_of_calls or state.is_inside else "last call"
        place |= {"file": call.file, "line": call.line, "from": source}
    told = answer.stacks if answer is not None else None
    return {
        **place,
        "no_stack": told if isinstance(told, str) else None,
        "told_s": None if answer is None else time.monotonic() - answer.at_s,
        "stack": [_plain(frame) for frame in frames],
    }


def _plain(value: Culprit | Frame) -> dict[str, Any]:
    facts = ((each.name, getattr(value, each.name)) for each in fields(value))
    return {name: list(each) if isinstance(each, tuple) else each for name, each in facts}


def _rank(seen: Seen, state: State, now_ns: int) -> dict[str, Any]:
    call = state.call
    named = ("name", "group", "number", "size_bytes", "file", "line")
    return {
        "rank": seen.rank.rank,
        "host": seen.facts.get("host", ""),
        "pid": seen.rank.pid,
        "process": seen.rank.condition,
        "is_idle": seen.rank.is_idle,
        "cpu_percent": seen.rank.cpu_percent,
        "memory_bytes": seen.rank.memory_bytes,
        "state": state.kind,
        "waits_for": list(state.waits_for),
        "since_s": max(now_ns - state.since_ns, 0) / _S,
        "is_in_call": state.is_inside,
        "call": None if call is None else {key: getattr(call, key) for key in named},
    }
