"""How replicas that are threads exchange what they bring, as XLA's do: it needs nothing of XLA."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerFailedError
from unisono.models.thread_exchange import ThreadExchange

RANKS = (0, 1, 2)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return error


def swap(
    exchange: ThreadExchange, ranks: tuple[int, ...], call: str = "barrier", limit_s: float = 30
) -> Any:
    """Let each rank come in a thread of its own; give what each one got."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        came = [
            pool.submit(
                outcome, partial(exchange.swap, "all", RANKS, r, call.format(r), r * 10, limit_s)
            )
            for r in ranks
        ]
        return [each.result(60) for each in came]


def test_everybody_gets_what_everybody_brings() -> None:
    exchange = ThreadExchange()
    for _ in range(20):
        assert swap(exchange, RANKS) == [[0, 10, 20]] * 3


def test_different_calls_are_an_error_on_all() -> None:
    errors = swap(ThreadExchange(), RANKS, "call of {}")
    assert [type(each) for each in errors] == [CollectiveMismatchError] * 3
    assert "rank 2: call of 2" in str(errors[0])


def test_one_that_does_not_come_is_named() -> None:
    (error,) = swap(ThreadExchange(), (0,), limit_s=0.1)
    assert isinstance(error, CollectiveTimeoutError)
    assert "ranks 1, 2 never arrived" in str(error)


def test_one_that_has_left_is_named_at_once() -> None:
    exchange = ThreadExchange()
    for rank in RANKS:
        exchange.join(rank)
    exchange.leave(2, "called finalize")
    errors = swap(exchange, (0, 1))
    assert [type(each) for each in errors] == [PeerFailedError] * 2
    assert "rank 2 called finalize" in str(errors[0])
    for rank in RANKS:
        exchange.join(rank)
    assert swap(exchange, RANKS) == [[0, 10, 20]] * 3


def test_one_that_gave_up_brings_another_item_when_it_comes_back() -> None:
    exchange = ThreadExchange()
    (error,) = swap(exchange, (0,), "early", limit_s=0.01)
    assert isinstance(error, CollectiveTimeoutError)
    exchange.join(0)
    assert swap(exchange, RANKS, "late") == [[0, 10, 20]] * 3
