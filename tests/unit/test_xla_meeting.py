"""Where XLA's replicas meet on the host: it needs nothing of XLA."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerFailedError
from unisono.models.xla.thread_exchange import Meeting

RANKS = (0, 1, 2)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def meet(
    meeting: Meeting, ranks: tuple[int, ...], call: str = "barrier", limit_s: float = 30
) -> Any:
    """Let each rank come in a thread of its own; give what each one got."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        came = [
            pool.submit(
                outcome, partial(meeting.swap, "all", RANKS, r, call.format(r), r * 10, limit_s)
            )
            for r in ranks
        ]
        return [each.result(60) for each in came]


def test_everybody_gets_what_everybody_brings() -> None:
    meeting = Meeting()
    for _ in range(20):
        assert meet(meeting, RANKS) == [[0, 10, 20]] * 3


def test_different_calls_are_an_error_on_all() -> None:
    said = meet(Meeting(), RANKS, "call of {}")
    assert [type(each) for each in said] == [CollectiveMismatchError] * 3
    assert "rank 2: call of 2" in str(said[0])


def test_one_that_does_not_come_is_named() -> None:
    (said,) = meet(Meeting(), (0,), limit_s=0.1)
    assert isinstance(said, CollectiveTimeoutError)
    assert "ranks 1 and 2 never came" in str(said)


def test_one_that_has_left_is_named_at_once() -> None:
    meeting = Meeting()
    for rank in RANKS:
        meeting.join(rank)
    meeting.leave(2, "called finalize")
    said = meet(meeting, (0, 1))
    assert [type(each) for each in said] == [PeerFailedError] * 2
    assert "rank 2 called finalize" in str(said[0])
    for rank in RANKS:
        meeting.join(rank)
    assert meet(meeting, RANKS) == [[0, 10, 20]] * 3
