"""Operations under way: their order, their values and their errors."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from unisono.model.handle import Background, Handle, SafeFuture


class Boom(Exception):
    pass


def test_the_value_or_the_error_is_the_same_at_every_wait() -> None:
    calls: list[int] = []

    def work(number: int) -> list[int]:
        calls.append(number)
        if number:
            raise Boom("once")
        return []

    handle = Handle(partial(work, 0), lambda: False)
    assert not handle.is_completed()
    assert handle.wait() is handle.wait()
    assert handle.is_completed()
    failed = Handle(partial(work, 1), lambda: True)
    assert failed.is_completed()
    raised = []
    for _ in range(2):
        with pytest.raises(Boom) as caught:
            failed.wait()
        raised.append(caught.value)
    assert raised[0] is raised[1]
    assert calls == [0, 1]


def test_a_call_in_a_thread_gives_its_value_or_raises_its_error() -> None:
    outcome, thread = SafeFuture.in_thread(lambda: threading.current_thread().name, "apart")
    thread.join()
    assert (outcome.is_known, outcome.wait()) == (True, "apart")
    failed, _ = SafeFuture.in_thread(lambda: 1 // 0, "apart")
    with pytest.raises(ZeroDivisionError):
        failed.wait()


def test_then_finishes_once_and_keeps_errors() -> None:
    finished: list[int] = []

    def finish(value: int) -> int:
        finished.append(value)
        return value * 10

    handle = Handle(lambda: 4, lambda: True).then(finish)
    assert handle.is_completed()
    assert finished == []
    assert (handle.wait(), handle.wait(), finished) == (40, 40, [4])

    def fail(value: int) -> int:
        raise Boom(str(value))

    failed = Handle(lambda: 4, lambda: True).then(fail).then(finish)
    for _ in range(2):
        with pytest.raises(Boom, match="4"):
            failed.wait()
    assert finished == [4]


def test_a_wait_that_was_interrupted_may_be_made_again() -> None:
    is_done, calls = False, 0

    def work() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        if calls == 2:
            raise TimeoutError("an alarm's")
        return 7

    handle = Handle(work, lambda: is_done)
    for kind in (KeyboardInterrupt, TimeoutError):
        with pytest.raises(kind):
            handle.wait()
        assert not handle.is_completed()
    assert (handle.wait(), handle.wait(), calls) == (7, 7, 3)
    assert handle.is_completed()


def test_a_second_thread_goes_on_where_the_first_was_interrupted() -> None:
    started, release = threading.Event(), threading.Event()

    def work() -> int:
        if not started.is_set():
            started.set()
            release.wait(20)
            raise KeyboardInterrupt
        return 7

    handle = Handle(work, lambda: False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(handle.wait)
        assert started.wait(20)
        second = pool.submit(handle.wait)
        release.set()
        assert isinstance(first.exception(20), KeyboardInterrupt)
        assert second.result(20) == 7


def test_what_an_interrupt_kept_from_the_queue_isnt_waited_for() -> None:
    background = Background("test-lost")
    background.submit(lambda: 1)
    background._last = SafeFuture()  # as an interrupt in `submit` leaves it
    waiting = threading.Thread(target=background.settle, daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    assert background.submit(lambda: 2).wait() == 2


def test_while_one_thread_waits_it_isnt_completed_for_another() -> None:
    started, release = threading.Event(), threading.Event()

    def work() -> int:
        started.set()
        release.wait(20)
        return 7

    handle = Handle(work, lambda: False)
    with ThreadPoolExecutor(3) as pool:
        values = [pool.submit(handle.wait) for _ in range(3)]
        assert started.wait(20)
        assert not handle.is_completed()
        release.set()
        assert [value.result(20) for value in values] == [7, 7, 7]
    assert handle.is_completed()


def test_calls_run_in_the_order_in_which_they_were_given() -> None:
    background = Background("test-order")
    background.settle()
    gate, seen = threading.Event(), list[int]()

    def call(number: int) -> int:
        assert gate.wait(20)
        seen.append(number)
        if number % 3 == 0:
            raise Boom(str(number))
        return number

    handles = [background.submit(partial(call, number)) for number in range(60)]
    assert not handles[0].is_completed()
    gate.set()
    background.settle()
    assert seen == list(range(60))
    assert all(handle.is_completed() for handle in handles)
    for number in reversed(range(60)):
        if number % 3 == 0:
            with pytest.raises(Boom, match=f"^{number}$"):
                handles[number].wait()
        else:
            assert handles[number].wait() == number


def test_what_a_call_submits_is_part_of_it() -> None:
    """At the end of the queue its place among the others would differ from rank to rank."""
    background = Background("test-nested")
    gate, seen = threading.Event(), []

    def inner() -> int:
        seen.append("inner")
        raise Boom("kept")

    def outer() -> Any:
        gate.wait(20)
        background.settle()
        inside = background.submit(inner)
        assert inside.is_completed()
        return inside

    first, second = background.submit(outer), background.submit(lambda: seen.append("second"))
    gate.set()
    background.settle()
    assert seen == ["inner", "second"]
    with pytest.raises(Boom, match="kept"):
        first.wait().wait()
    assert second.wait() is None


def test_the_thread_ends_with_its_owner() -> None:
    background = Background("test-end")
    handle = background.submit(lambda: 5)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test-end")
    del background
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert handle.wait() == 5
