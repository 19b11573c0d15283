"""What a signal to a process with ranks is: whose it is, and what the ranks get of it."""

from __future__ import annotations

import faulthandler
import signal
import time
from typing import Any

import pytest

from unisono.launchers.job.signals import END_S, OTHERS, TO_END, Orders, handled, signals

INT, TERM, USR1, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL
GRACE_S = 5.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # nohup: SIGHUP; a shell's "&": SIGINT
    try:
        with signals() as seen:
            signal.raise_signal(number)
        assert seen == []
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_handler_of_c_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_DFL)
    handlers[signal.SIGHUP] = None  # as Python calls one that it didn't install
    before = dict(handlers)

    def put(number: int, handler: Any) -> Any:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, ...")
        replaced, handlers[number] = handlers[number], handler
        return replaced

    monkeypatch.setattr(signal, "getsignal", handlers.get)
    monkeypatch.setattr(signal, "signal", put)
    with signals():
        assert handlers[signal.SIGHUP] is None
        assert callable(handlers[signal.SIGTERM])
    assert handlers == before


def test_handlers_of_the_program_stay_those_of_libraries_too() -> None:
    def own(*_: Any) -> None: ...

    numbers = (*TO_END, *OTHERS)
    before = signal.signal(TERM, own)
    faulthandler.register(USR1)
    try:
        within = {number: signal.getsignal(number) for number in numbers}
        with handled(numbers, print):
            taken = {number for number in numbers if signal.getsignal(number) is print}
        assert {number: signal.getsignal(number) for number in numbers} == within
    finally:
        faulthandler.unregister(USR1)
        signal.signal(TERM, before)
    assert not {TERM, USR1} & taken
    expected = {INT, signal.SIGHUP, signal.SIGUSR2, signal.SIGRTMAX}
    assert {number for number in expected if within[number] != signal.SIG_IGN} <= taken  # nohup


@pytest.mark.parametrize(
    ("numbers", "of_ranks", "time_s"),
    [
        ([USR1, USR1], [USR1, USR1], None),
        ([TERM], [TERM], GRACE_S),
        ([TERM, TERM], [TERM, 0], GRACE_S),  # at once: both are of whoever signals all processes
        ([INT], [INT], END_S),
        ([INT, INT], [INT, KILL], 0.0),
        ([TERM, USR1, INT], [TERM, USR1, KILL], 0.0),
    ],
)
def test_what_ranks_get(numbers: list[int], of_ranks: list[int], time_s: float | None) -> None:
    orders = Orders(GRACE_S)
    assert [orders.take(number) for number in numbers] == of_ranks
    assert orders.received == [number for number in numbers if number in TO_END]
    if time_s is None or orders.began_at is None or orders.until is None:
        assert (orders.began_at, orders.until, time_s) == (None, None, None)
    elif time_s == 0.0:
        assert orders.until <= time.monotonic()
    else:
        assert orders.until == orders.began_at + time_s


def test_a_later_signal_ends_ranks_and_so_does_the_end_of_who_started_them() -> None:
    orders = Orders(GRACE_S)
    assert orders.take(TERM) == TERM
    assert orders.began_at is not None
    orders.began_at -= 2.0
    assert orders.take(TERM) == KILL
    left = Orders(GRACE_S)
    assert [left.take(TERM, is_orphan=True) for _ in range(2)] == [TERM, KILL]
