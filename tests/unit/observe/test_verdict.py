"""Who waits for whom, on pages made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from unisono.observe.verdict import Rank, judge
from unisono.recording.status_page import ObservedCall
from unisono.topology import named

NOW = 100 * 10**9
ALL = "all ranks"


def call(
    name: str,
    number: int,
    begin_s: float,
    end_s: float = 0.0,
    *,
    ranks: tuple[int, ...] = (0, 1, 2),
    group: str = ALL,
    thread_id: int = 0,
    is_blocking: bool = True,
) -> ObservedCall:
    begin, end = int(begin_s * 1e9), int(end_s * 1e9)
    return ObservedCall(
        name, "gloo", group, ranks, number, "train.py", 7, begin, end, 0, thread_id, is_blocking
    )


def rank(number: int, *calls: ObservedCall, condition: str = "sleeping", cpu: float = 0.0) -> Rank:
    return Rank(number, 100 + number, condition, calls, 10**9, cpu_percent=cpu, thread_percent=cpu)


def done(number: int = 1) -> ObservedCall:
    return call("barrier", number, 10, 11)


def waiting(number: int = 2, begin_s: float = 90) -> ObservedCall:
    return call("all_reduce", number, begin_s)


def stepped(number: int = 1) -> ObservedCall:
    return call("all_reduce", number, 10, 11)


TWO = (0, 1)
ALONE = (rank(0, done()), rank(1, done(), waiting()), rank(2, done()))
STAYED = (rank(0, done(), waiting()), rank(1, done()), rank(2, done(), waiting()))
PAIR = call("broadcast", 3, 50, ranks=(1, 2), group="pair")
FAR_PAIR = call("broadcast", 3, 50, ranks=(1, 5), group="pair")
FAR_LEFT, FAR_STAYS = (call("barrier", 1, 10, end, ranks=(0, 1, 5)) for end in (11, 0))
SEND, RECV = (call(name, 1, 50, ranks=TWO, group="rank 0 to rank 1") for name in ("send", "recv"))
STARTED = call("all_reduce", 2, 50, is_blocking=False)
OF_MPI = ObservedCall("barrier", "mpi", ALL, TWO, 2, "a.py", 1, 50 * 10**9)


def case(name: str, kind: str, culprits: list[int], *ranks: Rank, said: str = "") -> Any:
    return pytest.param(ranks, kind, culprits, said, id=name)


@pytest.mark.parametrize(
    ("ranks", "kind", "culprits", "said"),
    [
        case("all are in one call, and wait for no rank", "none", [],
             *(rank(n, waiting()) for n in range(3)), said="in call: 0, 1, 2"),
        case("rank 0 waits for 1, which waits for 2 in another group", "late", [2],
             rank(0, waiting()), rank(1, done(), PAIR), rank(2, done(), cpu=100),
             said="(0, 1) 50.0"),
        case("one that is dead comes first", "dead", [1],
             rank(0, waiting()), rank(1, done(), condition="dead"), rank(2, done()),
             said="dead: 1"),
        case("one died within the call", "dead", [1],
             rank(0, waiting()), rank(1, waiting(), condition="dead"), rank(2, waiting()),
             said="(0, 2)"),
        case("one is stopped before the call of others", "stopped", [1],
             rank(0, done(), waiting()), rank(1, done(), condition="stopped"), said="stopped: 1"),
        case("one is stopped within the call of others", "stopped", [1],
             rank(0, done(), waiting()), rank(1, done(), waiting(), condition="stopped"),
             said="stopped: 1"),
        case("the job is stopped as a whole", "none", [],
             *(rank(n, done(), condition="stopped") for n in range(3))),
        case("of threads, which are stopped together, one did not come", "stopped", [1],
             *(replace(each, pid=100, condition="stopped") for each in STAYED)),
        case("of processes all are stopped while two wait", "stopped", [0, 1, 2],
             *(replace(each, condition="stopped") for each in STAYED)),
        case("another call of the same number", "mismatch", [1],
             rank(0, waiting()), rank(1, call("broadcast", 2, 80)), rank(2, waiting()),
             said="ranks 0, 2 called all_reduce"),
        case("two calls of the same number, of two ranks", "mismatch", [0, 1],
             *(rank(n, call(("barrier", "gather")[n], 1, 50, ranks=TWO)) for n in TWO)),
        case("ranks wait for each other", "deadlock", [1],
             rank(0, waiting()), rank(1, call("barrier", 1, 60, ranks=TWO, group="pair")),
             rank(2, waiting()), said="wait for each other"),
        case("one waits alone while all others are idle: a call too many", "extra call", [1],
             *ALONE),
        case("one waits alone in a line that others know, as in a loop", "late", [0, 2],
             rank(0, stepped()), rank(1, stepped(), waiting()), rank(2, stepped())),
        case("one waits alone for ranks that are busy", "late", [0, 2],
             rank(0, done(), cpu=99), rank(1, done(), waiting()), rank(2, done(), cpu=99)),
        case("at the first look it isn't known yet how busy a rank is", "late", [0, 2],
             *(replace(each, thread_percent=None) for each in ALONE)),
        case("a rank without a page may be what others wait for", "unseen", [],
             rank(0, waiting()), rank(1, waiting()), said="rank 2"),
        case("rank 0 waits for 1, which waits for 5, of another host", "unseen", [],
             rank(0, waiting()), rank(1, done(), FAR_PAIR)),
        case("one stays in a call that others have left, on several hosts", "late", [1],
             rank(0, FAR_LEFT, waiting()), rank(1, FAR_STAYS),
             said="is in barrier, where it waits for no rank"),
        case("a message that takes long is no mismatch", "none", [],
             rank(0, SEND), rank(1, RECV)),
        case("a page without room for a name makes no mismatch", "unseen", [],
             rank(0, waiting()), rank(1, call("", 2, 90))),
        case("what was started and is not waited for is no wait", "none", [],
             rank(0, done(), STARTED), rank(1, done()), said="computes: 0, 1"),
        case("contexts have numbers of their own", "deadlock", [0, 1],
             rank(0, waiting()), rank(1, OF_MPI)),
    ],
)  # fmt: skip
def test_who_makes_the_others_wait(
    ranks: Sequence[Rank], kind: str, culprits: list[int], said: str
) -> None:
    verdict = judge(ranks, NOW)
    assert (verdict.kind, [each.rank for each in verdict.culprits]) == (kind, culprits)
    found = [verdict.text]
    found += [f"{each.why}; {each.waiters} {each.waited_s}" for each in verdict.culprits]
    for state in {each.kind for each in verdict.states.values()}:
        those = [str(n) for n, each in sorted(verdict.states.items()) if each.kind == state]
        found.append(f"{state}: {', '.join(those)}")
    assert said in "\n".join(found)


def test_a_rank_that_did_not_come_is_late() -> None:
    ranks = [rank(0, done(), waiting()), rank(1, done(), cpu=99), rank(2, done(), waiting())]
    verdict = judge(ranks, NOW)
    assert verdict.kind == "late"
    assert verdict.text == "ranks 0, 2 wait for rank 1"
    (culprit,) = verdict.culprits
    assert (culprit.rank, culprit.waiters, culprit.waited_s) == (1, (0, 2), 10.0)
    assert culprit.lost_s == pytest.approx(20.0)
    assert culprit.why == "is busy outside of calls"
    assert verdict.states[0].kind == "waits"
    assert verdict.states[0].waits_for == (1,)
    assert (verdict.states[1].kind, verdict.states[1].since_ns) == ("computes", 11 * 10**9)
    assert not verdict.states[1].is_inside


def test_a_short_wait_names_nobody() -> None:
    ranks = [rank(0, done(), waiting(begin_s=99.9)), rank(1, done())]
    verdict = judge(ranks, NOW)
    assert (verdict.kind, verdict.culprits) == ("none", ())
    assert verdict.states[0].waits_for == (1,)
    assert judge(ranks, NOW + 10**9).culprits[0].rank == 1


def test_who_is_known_to_be_early_made_no_call_too_many() -> None:
    verdict = judge(ALONE, NOW, may_be_extra=False)
    assert verdict.kind == "late"
    assert [each.rank for each in verdict.culprits] == [0, 2]


def test_who_has_started_what_others_wait_for_has_come() -> None:
    assert judge([rank(0, waiting()), rank(1, STARTED)], NOW).states[0].waits_for == ()


def test_the_inner_call_of_a_section_counts() -> None:
    section, inner = call("one_rank_first", 2, 50, ranks=TWO), call("barrier", 3, 60, ranks=TWO)
    verdict = judge([rank(0, section, inner), rank(1, section)], NOW)
    assert [each.rank for each in verdict.culprits] == [1]
    assert verdict.states[0].call == inner


def test_calls_that_are_over_tell_who_came_last() -> None:
    """Rank 1 comes two seconds late each time, and others wait for these only."""
    early, late = (
        [call("all_reduce", n, 10 * n + late, 10 * n + 2.5, ranks=TWO) for n in range(1, 6)]
        for late in (0, 2)
    )
    now = call("all_reduce", 6, 90, ranks=TWO)
    (culprit,) = judge([rank(0, *early, now), rank(1, *late)], NOW).culprits
    assert (culprit.came_last, culprit.n_calls) == (5, 5)
    assert culprit.median_late_s == pytest.approx(2.0)
    assert culprit.lost_s == pytest.approx(5 * 2 + 10)


def test_who_did_not_wait_has_lost_nothing() -> None:
    """The source of a broadcast goes on before the other comes."""
    source = call("broadcast", 1, 10, 10.1, ranks=TWO)
    other = call("broadcast", 1, 40, 41, ranks=TWO)
    now = call("barrier", 2, 90, ranks=TWO)
    (culprit,) = judge([rank(0, source, now), rank(1, other)], NOW).culprits
    assert culprit.lost_s == pytest.approx(10.1)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0, 1"),
        ([3, 2, 0, 1], "ranks 0-3"),
        ([0, 2, 3, 4, 9], "ranks 0, 2-4, 9"),
    ],
)
def test_ranks_are_named(ranks: list[int], text: str) -> None:
    assert named(ranks) == text
