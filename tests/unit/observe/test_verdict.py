"""Who waits for whom, on pages made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unisono.observe.verdict import Call, Rank, judge, named

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
    lane: int = 0,
    is_blocking: bool = True,
) -> Call:
    begin, end = int(begin_s * 1e9), int(end_s * 1e9)
    return Call(name, "gloo", group, ranks, number, "train.py", 7, begin, end, 0, lane, is_blocking)


def rank(number: int, *calls: Call, condition: str = "sleeping", cpu: float = 0.0) -> Rank:
    return Rank(number, 100 + number, condition, calls, cpu, 0, 10**9, cpu)


def done(number: int = 1) -> Call:
    return call("barrier", number, 10, 11)


def waiting(number: int = 2, begin_s: float = 90) -> Call:
    return call("all_reduce", number, begin_s)


def stepped(number: int = 1) -> Call:
    return call("all_reduce", number, 10, 11)


ALONE = [rank(0, done()), rank(1, done(), waiting()), rank(2, done())]


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
    assert judge(ranks, NOW, patience_s=0.05).culprits[0].rank == 1


def test_ranks_that_are_all_in_one_call_wait_for_nobody() -> None:
    verdict = judge([rank(each, waiting()) for each in range(3)], NOW)
    assert verdict.kind == "none"
    assert {state.kind for state in verdict.states.values()} == {"in call"}


def test_who_waits_for_somebody_else_is_not_named() -> None:
    """Rank 0 waits for 1, which waits for 2 in another group."""
    pair = call("broadcast", 3, 50, ranks=(1, 2), group="pair")
    ranks = [rank(0, waiting()), rank(1, done(), pair), rank(2, done(), cpu=100)]
    (culprit,) = judge(ranks, NOW).culprits
    assert (culprit.rank, culprit.waiters, culprit.waited_s) == (2, (0, 1), 50.0)


def test_a_dead_rank_comes_first() -> None:
    ranks = [rank(0, waiting()), rank(1, done(), condition="dead"), rank(2, done())]
    verdict = judge(ranks, NOW)
    assert verdict.kind == "dead"
    assert [each.rank for each in verdict.culprits] == [1]
    assert verdict.states[1].kind == "dead"


def test_a_rank_that_died_in_a_call_is_waited_for() -> None:
    ranks = [rank(0, waiting()), rank(1, waiting(), condition="dead"), rank(2, waiting())]
    assert judge(ranks, NOW).culprits[0].waiters == (0, 2)


@pytest.mark.parametrize("calls", [(), (waiting(),)], ids=["before", "within"])
def test_a_stopped_rank_is_named_where_others_wait_for_it(calls: tuple[Call, ...]) -> None:
    ranks = [rank(0, done(), waiting()), rank(1, done(), *calls, condition="stopped")]
    verdict = judge(ranks, NOW)
    assert (verdict.kind, verdict.culprits[0].rank) == ("stopped", 1)
    assert verdict.states[1].kind == "stopped"


def test_a_job_that_is_stopped_as_a_whole_has_no_culprit() -> None:
    ranks = [rank(each, done(), condition="stopped") for each in range(3)]
    assert judge(ranks, NOW).kind == "none"


def test_of_ranks_that_are_stopped_together_the_one_that_did_not_come_is_named() -> None:
    """Threads share their process: the others are stopped too, but in the call."""
    ranks = [rank(0, done(), waiting()), rank(1, done()), rank(2, done(), waiting())]
    together = [replace(each, pid=100, condition="stopped") for each in ranks]
    apart = [replace(each, condition="stopped") for each in ranks]
    assert [each.rank for each in judge(together, NOW).culprits] == [1]
    assert [each.rank for each in judge(apart, NOW).culprits] == [0, 1, 2]


def test_another_call_of_the_same_number_is_a_mismatch() -> None:
    ranks = [rank(0, waiting()), rank(1, call("broadcast", 2, 80)), rank(2, waiting())]
    verdict = judge(ranks, NOW)
    assert verdict.kind == "mismatch"
    assert "ranks 0, 2 called all_reduce" in verdict.text
    assert [each.rank for each in verdict.culprits] == [1]


def test_a_mismatch_of_two_names_both() -> None:
    two = (0, 1)
    ranks = [
        rank(0, call("all_reduce", 1, 50, ranks=two)),
        rank(1, call("barrier", 1, 50, ranks=two)),
    ]
    assert [each.rank for each in judge(ranks, NOW).culprits] == [0, 1]


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    pair = call("barrier", 1, 60, ranks=(0, 1), group="pair")
    ranks = [rank(0, waiting()), rank(1, pair), rank(2, waiting())]
    verdict = judge(ranks, NOW)
    assert verdict.kind == "deadlock"
    assert "wait for each other" in verdict.text
    assert [each.rank for each in verdict.culprits] == [1]


def test_who_waits_alone_while_all_others_are_idle_made_a_call_too_many() -> None:
    verdict = judge(ALONE, NOW)
    assert verdict.kind == "extra call"
    assert [each.rank for each in verdict.culprits] == [1]


def test_who_waits_alone_in_a_line_that_others_know_is_early() -> None:
    """As in a loop, where two of three wait for data: they come to that line again."""
    ranks = [rank(0, stepped()), rank(1, stepped(), waiting()), rank(2, stepped())]
    verdict = judge(ranks, NOW)
    assert verdict.kind == "late"
    assert [each.rank for each in verdict.culprits] == [0, 2]


def test_who_is_known_to_be_early_made_no_call_too_many() -> None:
    verdict = judge(ALONE, NOW, is_early=True)
    assert verdict.kind == "late"
    assert [each.rank for each in verdict.culprits] == [0, 2]


def test_who_waits_alone_for_busy_ranks_did_not() -> None:
    ranks = [rank(0, done(), cpu=99), rank(1, done(), waiting()), rank(2, done(), cpu=99)]
    verdict = judge(ranks, NOW)
    assert verdict.kind == "late"
    assert [each.rank for each in verdict.culprits] == [0, 2]


def test_ranks_without_a_page_may_be_what_others_wait_for() -> None:
    ranks = [rank(0, waiting()), rank(1, waiting())]
    verdict = judge(ranks, NOW)
    assert (verdict.kind, verdict.culprits) == ("unseen", ())
    assert "rank 2" in verdict.text


def test_who_may_wait_for_a_rank_of_another_host_is_not_named() -> None:
    """Rank 0 waits for 1, which waits for 5: what that one does can't be seen from here."""
    pair = call("broadcast", 3, 50, ranks=(1, 5), group="pair")
    verdict = judge([rank(0, waiting()), rank(1, done(), pair)], NOW)
    assert (verdict.kind, verdict.culprits) == ("unseen", ())


def test_who_stays_in_a_call_that_others_have_left_is_named_on_several_hosts_too() -> None:
    all_ranks = (0, 1, 5)
    left, stays = call("barrier", 1, 10, 11, ranks=all_ranks), call("barrier", 1, 10)
    (culprit,) = judge([rank(0, left, waiting()), rank(1, stays)], NOW).culprits
    assert (culprit.rank, culprit.why) == (1, "is in barrier, where it waits for no rank")


def test_a_message_that_takes_long_is_no_mismatch() -> None:
    send, recv = (
        call(name, 1, 50, ranks=(0, 1), group="rank 0 to rank 1") for name in ("send", "recv")
    )
    assert judge([rank(0, send), rank(1, recv)], NOW).kind == "none"


def test_a_page_without_room_for_a_name_makes_no_mismatch() -> None:
    assert judge([rank(0, waiting()), rank(1, call("", 2, 90))], NOW).kind != "mismatch"


def test_nobody_is_idle_at_the_first_look() -> None:
    """How busy a rank is takes two looks: until then, nobody made a call too many."""
    first = [replace(each, thread_percent=None) for each in ALONE]
    assert judge(ALONE, NOW).kind == "extra call"
    assert judge(first, NOW).kind == "late"


def test_what_was_started_and_is_not_waited_for_is_no_wait() -> None:
    started = call("all_reduce", 2, 50, is_blocking=False)
    verdict = judge([rank(0, done(), started), rank(1, done())], NOW)
    assert verdict.kind == "none"
    assert verdict.states[0].kind == "computes"
    came = judge([rank(0, waiting()), rank(1, started)], NOW)
    assert came.states[0].waits_for == ()


def test_the_inner_call_of_a_section_counts() -> None:
    section = call("one_rank_first", 2, 50, ranks=(0, 1))
    inner = call("barrier", 3, 60, ranks=(0, 1))
    ranks = [rank(0, section, inner), rank(1, section)]
    verdict = judge(ranks, NOW)
    assert [each.rank for each in verdict.culprits] == [1]
    assert verdict.states[0].call == inner


def test_calls_that_are_over_tell_who_came_last() -> None:
    """Rank 1 comes two seconds late each time, and others wait for these only."""
    two = (0, 1)
    early = [call("all_reduce", n, 10 * n, 10 * n + 2.5, ranks=two) for n in range(1, 6)]
    late = [call("all_reduce", n, 10 * n + 2, 10 * n + 2.5, ranks=two) for n in range(1, 6)]
    now = call("all_reduce", 6, 90, ranks=two)
    (culprit,) = judge([rank(0, *early, now), rank(1, *late)], NOW).culprits
    assert (culprit.came_last, culprit.n_calls) == (5, 5)
    assert culprit.median_late_s == pytest.approx(2.0)
    assert culprit.lost_s == pytest.approx(5 * 2 + 10)


def test_who_did_not_wait_has_lost_nothing() -> None:
    """The source of a broadcast goes on before the other comes."""
    two = (0, 1)
    source, other = (
        call("broadcast", 1, 10, 10.1, ranks=two),
        call("broadcast", 1, 40, 41, ranks=two),
    )
    now = call("barrier", 2, 90, ranks=two)
    (culprit,) = judge([rank(0, source, now), rank(1, other)], NOW).culprits
    assert culprit.lost_s == pytest.approx(10.1)


def test_contexts_have_numbers_of_their_own() -> None:
    other = Call("barrier", "mpi", ALL, (0, 1), 2, "a.py", 1, 50 * 10**9)
    ranks = [rank(0, waiting()), rank(1, other)]
    assert judge(ranks, NOW).kind == "deadlock"


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
