"""An interrupt at any moment of a call, and what every rank may meet after it.

CPython looks for signals when a function begins and after a call of C, not between any two
bytecodes. `interrupted_at` raises at the n-th such place within unisono, in this thread; `alarm` is
a real signal after so many seconds, which also interrupts what waits in C. What is raised is
KeyboardInterrupt, or an ordinary exception, as by the alarm of a test that takes too long.
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

_OURS = str(Path(idist.__file__).parent)
_SIZE = 300_000  # elements: too large for a round of the control plane


class Alarm(Exception):
    """What a handler of signals may raise."""


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
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:  # it may only be closed: that is lost
            self._pass(frame)
        return self.step

    def step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _after_calls(frame.f_code):
            self._pass(frame)
        return self.step


def _is_collected(frame: FrameType | None) -> bool:
    """Tell whether this is a finalizer's callback: what is raised there is printed and lost."""
    while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_locals["_"] is not None


@functools.cache
def _after_calls(code: CodeType) -> frozenset[int]:
    """Give the offsets that follow a call and are handled as the call is.

    The signal is seen by the call itself, but a trace function raises at what comes after it.
    """
    found, called = set(), None
    for step in dis.get_instructions(code):
        if called is not None and _handler(code, called) == _handler(code, step.offset):
            found.add(step.offset)
        called = step.offset if step.opname.startswith("CALL") else None
    return frozenset(found)


def _handler(code: CodeType, offset: int) -> object:
    parse = getattr(dis, "_parse_exception_table", None)  # Python 3.11 has no blocks but a table
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
    """Raise an error by a signal, once; in the main thread."""

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


def _number(rank: int, tag: int) -> int:
    return 10 * tag + rank


def _numbers(rank: int, tag: int) -> list[int]:
    return [_number(0, tag), _number(1, tag)]


def _total(rank: int, tag: int) -> int:
    return sum(_numbers(rank, tag))


def _totals(rank: int, tag: int) -> list[int]:
    return [_total(rank, tag)]


def _first(rank: int, tag: int) -> int:
    return _number(0, tag)


def _of_rank_0(give: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    return lambda rank, tag: None if rank else give(rank, tag)


def _tensor(rank: int, tag: int, size: int = 4) -> Any:
    return torch.full((size,), _number(rank, tag), dtype=torch.int64)


def _large(rank: int, tag: int) -> Any:
    return _tensor(rank, tag, _SIZE)


def _alike(found: Any, wanted: Any) -> bool:
    """Compare values; of a tensor each equal part is filled with one of the numbers."""
    if isinstance(found, torch.Tensor):
        parts = found.reshape(len(wanted), -1)
        return all(bool((part == each).all()) for part, each in zip(parts, wanted, strict=True))
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(_alike(found[k], wanted[k]) for k in found)
    if isinstance(found, list):
        return len(found) == len(wanted) and all(map(_alike, found, wanted))
    return bool(found == wanted)


def _section(rank: int, tag: int) -> int:
    with idist.one_rank_first():
        return tag


def _message(rank: int, tag: int) -> Any:
    if rank == 0:
        return idist.send((0, tag), 1)
    return idist.recv(0)


def _started(rank: int, tag: int) -> list[Any]:
    handles = [
        idist.all_gather(_number(rank, tag), async_op=True),
        idist.all_reduce(_large(rank, tag), async_op=True),
        idist.barrier(async_op=True),
    ]
    return [handle.wait() for handle in handles]


@dataclass(frozen=True)
class Operation:
    """A call, and what it should give on a rank."""

    call: Callable[[int, int], Any]
    gives: Callable[[int, int], Any]


OPERATIONS = {
    name: Operation(call, gives)
    for name, (call, gives) in {
        "all_reduce of a number": (lambda r, t: idist.all_reduce(_number(r, t)), _total),
        "all_reduce of a small tensor": (lambda r, t: idist.all_reduce(_tensor(r, t)), _totals),
        "all_reduce of a large tensor": (lambda r, t: idist.all_reduce(_large(r, t)), _totals),
        "all_reduce of a dict": (
            lambda r, t: idist.all_reduce({"n": _number(r, t), "t": _tensor(r, t)}),
            lambda r, t: {"n": _total(r, t), "t": _totals(r, t)},
        ),
        "all_reduce_": (lambda r, t: idist.all_reduce_(_large(r, t)), _totals),
        "all_gather of objects": (
            lambda r, t: idist.all_gather({"n": _number(r, t)}),
            lambda r, t: [{"n": number} for number in _numbers(r, t)],
        ),
        "all_gather of large objects": (
            lambda r, t: idist.all_gather(str(_number(r, t)) * _SIZE),
            lambda r, t: [str(number) * _SIZE for number in _numbers(r, t)],
        ),
        "all_gather of tensors": (lambda r, t: idist.all_gather(_large(r, t)), _numbers),
        "broadcast": (lambda r, t: idist.broadcast(_number(r, t), src=0), _first),
        "broadcast_": (
            lambda r, t: idist.broadcast_(_large(r, t), src=1),
            lambda r, t: [_number(1, t)],
        ),
        "reduce": (lambda r, t: idist.reduce(_tensor(r, t), dst=0), _of_rank_0(_totals)),
        "gather": (lambda r, t: idist.gather(_number(r, t), dst=0), _of_rank_0(_numbers)),
        "scatter": (
            lambda r, t: idist.scatter(None if r else _numbers(r, t), src=0),
            _number,
        ),
        "reduce_scatter": (lambda r, t: idist.reduce_scatter(_tensor(r, t)), _totals),
        "all_to_all": (lambda r, t: idist.all_to_all([_number(r, t)] * 2), _numbers),
        "barrier": (lambda r, t: idist.barrier(), lambda r, t: None),
        "messages": (_message, lambda r, t: (0, t) if r else None),
        "new_group": (
            lambda r, t: idist.all_gather(_number(r, t), group=idist.new_group([0, 1])),
            _numbers,
        ),
        "one_rank_first": (_section, lambda r, t: t),
        "handles": (_started, lambda r, t: [_numbers(r, t), _totals(r, t), None]),
    }.items()
}


@dataclass(frozen=True)
class Trial:
    """One interrupt.

    Args:
        name: of the operation.
        tag: tells its values from those of other trials.
        victim: the rank that is interrupted.
        place: where, by number; 0 for an alarm.
        after_s: when, for an alarm.
        error: what is raised.
    """

    name: str
    tag: int
    victim: int
    place: int
    after_s: float = 0.0
    error: type[BaseException] = KeyboardInterrupt


@dataclass
class Report:
    """What became of one trial on one rank."""

    trial: Trial
    rank: int
    was_interrupted: bool = False
    where: str = ""
    said: str = ""
    seconds: float = 0.0
    wrong: str = ""


def run_trial(trial: Trial, rank: int) -> Report:
    """Make the call, interrupted on one rank; then another one, which must be right or refused."""
    report, operation = Report(trial, rank), OPERATIONS[trial.name]

    def attempt(what: str, call: Callable[[], Any], wanted: Any, *interrupt: Any) -> None:
        try:
            value = call()
            if not _alike(value, wanted):
                report.wrong += f"{what} gave {str(value)[:200]}; "
        except interrupt:
            report.was_interrupted = True
        except UnisonoError as error:
            report.said += f"{what}: {type(error).__name__}: {error}; "
        except BaseException as error:
            report.wrong += f"{what} raised {type(error).__name__}: {error}; "

    begin, wanted = time.monotonic(), operation.gives(rank, trial.tag)
    attempt("it", lambda: _interrupted(trial, rank, operation, report), wanted, trial.error)
    mine, both = trial.tag << 8 * rank, trial.tag ^ trial.tag << 8
    attempt("the next call", lambda: idist.all_reduce(mine, "XOR"), both)  # as no operation above
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
