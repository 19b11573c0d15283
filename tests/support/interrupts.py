"""An interrupt at any moment of a call, and the results that every rank may get after it.

CPython checks for signals when a function begins and after a call of C code, not between any two
bytecodes. `interrupted_at` raises at the n-th such place within unisono, in this thread; `alarm`
sends a real signal after some seconds, which also interrupts waits in C. Both raise
KeyboardInterrupt, or an ordinary exception, as the alarm of a test's time limit does.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import unisono as idist
from unisono.errors import UnisonoError
from unisono.testing.cases._law import same

_OURS = str(Path(idist.__file__).parent)
_SIZE = 300_000  # elements: too large for a round of the control plane


class Alarm(Exception):
    """An ordinary exception, as a signal handler may raise it."""


class Places:
    """Counts places, and raises at one of them."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at = at
        self.error = error
        self.seen = 0
        self.where = ""

    def _pass(self, frame: FrameType) -> None:
        self.seen += 1
        if self.seen == self.at and _is_collected(frame):
            self.at += 1
        elif self.seen == self.at:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise self.error

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        # A generator may only be entered to be closed, where an exception would be lost.
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self._pass(frame)
        return self.step

    def step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _after_calls(frame.f_code):
            self._pass(frame)
        return self.step


def _is_collected(frame: FrameType | None) -> bool:
    """Return whether a finalizer's callback runs, whose exceptions are printed and lost."""
    while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["_"] is not None


@functools.cache
def _after_calls(code: CodeType) -> frozenset[int]:
    """Return the offsets of instructions after a call that have the call's exception handler.

    A signal raises in the call itself, but a trace function raises at the next instruction.
    """
    found, called = set(), None
    for step in dis.get_instructions(code):
        if called is not None and _handler(code, called) == _handler(code, step.offset):
            found.add(step.offset)
        called = step.offset if step.opname.startswith("CALL") else None
    return frozenset(found)


def _handler(code: CodeType, offset: int) -> object:
    parse = getattr(dis, "_parse_exception_table", None)  # since Python 3.11
    for entry in parse(code) if parse else ():
        if entry.start <= offset < entry.end:
            return entry.target
    return None


@contextlib.contextmanager
def interrupted_at(n: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[Places]:
    """Raise an error at the n-th place of the block within unisono; 0 for nowhere."""
    places = Places(n, error)
    before = sys.gettrace()
    sys.settrace(places.enter)
    try:
        yield places
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def alarm(after_s: float, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """Raise an error once by a signal, after some seconds; the block is in the main thread."""

    def ring(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def _numbers(tag: int) -> list[int]:
    """Return the input of each rank."""
    return [10 * tag, 10 * tag + 1]


def _tensor(number: int, size: int = _SIZE) -> torch.Tensor:
    return torch.full((size,), number, dtype=torch.int64)


def _section(rank: int, numbers: list[int]) -> int:
    with idist.one_rank_first():
        return numbers[rank]


def _started(rank: int, numbers: list[int]) -> list[Any]:
    handles: list[Any] = [
        idist.all_gather(numbers[rank], async_op=True),
        idist.all_reduce(_tensor(numbers[rank]), async_op=True),
        idist.barrier(async_op=True),
    ]
    return [handle.wait() for handle in handles]


@dataclass(frozen=True)
class Operation:
    """A call and its expected result, both from a rank and the numbers of both ranks."""

    make: Callable[[int, list[int]], Any]
    expected: Callable[[int, list[int]], Any]

    def call(self, rank: int, tag: int) -> Any:
        return self.make(rank, _numbers(tag))

    def result(self, rank: int, tag: int) -> Any:
        return self.expected(rank, _numbers(tag))


OPERATIONS = {
    name: Operation(make, expected)
    for name, (make, expected) in {
        "all_reduce of a number": (lambda r, n: idist.all_reduce(n[r]), lambda r, n: sum(n)),
        "all_reduce of a small tensor": (
            lambda r, n: idist.all_reduce(_tensor(n[r], 4)),
            lambda r, n: _tensor(sum(n), 4),
        ),
        "all_reduce of a large tensor": (
            lambda r, n: idist.all_reduce(_tensor(n[r])),
            lambda r, n: _tensor(sum(n)),
        ),
        "all_reduce of a dict": (
            lambda r, n: idist.all_reduce({"n": n[r], "t": _tensor(n[r], 4)}),
            lambda r, n: {"n": sum(n), "t": _tensor(sum(n), 4)},
        ),
        "all_reduce_": (
            lambda r, n: idist.all_reduce_(_tensor(n[r])),
            lambda r, n: _tensor(sum(n)),
        ),
        "all_gather of objects": (
            lambda r, n: idist.all_gather({"n": n[r]}),
            lambda r, n: [{"n": number} for number in n],
        ),
        "all_gather of large objects": (
            lambda r, n: idist.all_gather(str(n[r]) * _SIZE),
            lambda r, n: [str(number) * _SIZE for number in n],
        ),
        "all_gather of tensors": (
            lambda r, n: idist.all_gather(_tensor(n[r])),
            lambda r, n: torch.cat([*map(_tensor, n)]),
        ),
        "broadcast": (lambda r, n: idist.broadcast(n[r], src=0), lambda r, n: n[0]),
        "broadcast_": (
            lambda r, n: idist.broadcast_(_tensor(n[r]), src=1),
            lambda r, n: _tensor(n[1]),
        ),
        "reduce": (
            lambda r, n: idist.reduce(_tensor(n[r], 4), dst=0),
            lambda r, n: None if r else _tensor(sum(n), 4),
        ),
        "gather": (lambda r, n: idist.gather(n[r], dst=0), lambda r, n: None if r else n),
        "scatter": (lambda r, n: idist.scatter(None if r else n, src=0), lambda r, n: n[r]),
        "reduce_scatter": (
            lambda r, n: idist.reduce_scatter(_tensor(n[r], 4)),
            lambda r, n: _tensor(sum(n), 2),
        ),
        "all_to_all": (lambda r, n: idist.all_to_all([n[r]] * 2), lambda r, n: n),
        "barrier": (lambda r, n: idist.barrier(), lambda r, n: None),
        "messages": (
            lambda r, n: idist.recv(0) if r else idist.send((0, n[0]), 1),
            lambda r, n: (0, n[0]) if r else None,
        ),
        "new_group": (
            lambda r, n: idist.all_gather(n[r], group=idist.new_group([0, 1])),
            lambda r, n: n,
        ),
        "one_rank_first": (_section, lambda r, n: n[r]),
        "handles": (_started, lambda r, n: [n, _tensor(sum(n)), None]),
    }.items()
}


@dataclass(frozen=True)
class Trial:
    """One interrupt.

    Args:
        name: name of the operation.
        tag: a number that distinguishes its values from those of other trials.
        victim: the rank that is interrupted.
        place: number of the place of the interrupt; 0 for an alarm.
        after_s: seconds until the alarm.
        error: the class that is raised.
    """

    name: str
    tag: int
    victim: int
    place: int
    after_s: float = 0.0
    error: type[BaseException] = KeyboardInterrupt


@dataclass
class Report:
    """The outcome of one trial on one rank."""

    trial: Trial
    rank: int
    was_interrupted: bool = False
    where: str = ""
    said: str = ""
    seconds: float = 0.0
    wrong: str = ""


def run_trial(trial: Trial, rank: int) -> Report:
    """Make a call that is interrupted on one rank, then one that must be right or refused."""
    report, operation = Report(trial, rank), OPERATIONS[trial.name]

    def attempt(what: str, call: Callable[[], Any], wanted: Any, *interrupt: Any) -> None:
        try:
            same(call(), wanted)
        except interrupt:
            report.was_interrupted = True
        except UnisonoError as error:
            report.said += f"{what}: {type(error).__name__}: {error}; "
        except BaseException as error:
            report.wrong += f"{what}: {type(error).__name__}: {error}; "

    begin, wanted = time.monotonic(), operation.result(rank, trial.tag)
    attempt("it", lambda: _interrupted(trial, rank, operation, report), wanted, trial.error)
    mine, both = trial.tag << 8 * rank, trial.tag ^ trial.tag << 8
    # No operation above is an XOR, so a mix of two calls would be noticed.
    attempt("the next call", lambda: idist.all_reduce(mine, "XOR"), both)
    report.seconds = time.monotonic() - begin
    return report


def _interrupted(trial: Trial, rank: int, operation: Operation, report: Report) -> Any:
    if rank != trial.victim:
        return operation.call(rank, trial.tag)
    if trial.place:
        with interrupted_at(trial.place, trial.error) as places:
            try:
                return operation.call(rank, trial.tag)
            finally:
                report.where = places.where
    assert threading.current_thread() is threading.main_thread()
    with alarm(trial.after_s, trial.error):
        return operation.call(rank, trial.tag)
