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

__all__ = ("OPERATIONS", "Alarm", "Report", "Trial", "alarm", "interrupted_at", "run_trial")

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


def _numbers(tag: int) -> list[int]:
    return [_number(0, tag), _number(1, tag)]


def _tensor(rank: int, tag: int, size: int = 4) -> Any:
    return torch.full((size,), _number(rank, tag), dtype=torch.int64)


def _same(tensor: Any, values: list[int]) -> bool:
    parts = tensor.reshape(len(values), -1)
    return all(bool((part == value).all()) for part, value in zip(parts, values, strict=True))


def _section(rank: int, tag: int) -> int:
    with idist.one_rank_first():
        return tag


def _message(rank: int, tag: int) -> Any:
    if rank == 0:
        return idist.send((0, tag), 1)
    return idist.recv(0)


def _started(rank: int, tag: int) -> list[Any]:
    tensor = _tensor(rank, tag, _SIZE)
    handles = [
        idist.all_gather(_number(rank, tag), async_op=True),
        idist.all_reduce(tensor, async_op=True),
        idist.barrier(async_op=True),
    ]
    return [handle.wait() for handle in handles]


@dataclass(frozen=True)
class Operation:
    """A call, and whether what it gave on a rank is right."""

    call: Callable[[int, int], Any]
    is_right: Callable[[Any, int, int], bool]


OPERATIONS = {
    "all_reduce of a number": Operation(
        lambda r, t: idist.all_reduce(_number(r, t)), lambda v, r, t: v == sum(_numbers(t))
    ),
    "all_reduce of a small tensor": Operation(
        lambda r, t: idist.all_reduce(_tensor(r, t)), lambda v, r, t: _same(v, [sum(_numbers(t))])
    ),
    "all_reduce of a large tensor": Operation(
        lambda r, t: idist.all_reduce(_tensor(r, t, _SIZE)),
        lambda v, r, t: _same(v, [sum(_numbers(t))]),
    ),
    "all_reduce of a dict": Operation(
        lambda r, t: idist.all_reduce({"n": _number(r, t), "t": _tensor(r, t)}),
        lambda v, r, t: v["n"] == sum(_numbers(t)) and _same(v["t"], [sum(_numbers(t))]),
    ),
    "all_reduce_": Operation(
        lambda r, t: idist.all_reduce_(_tensor(r, t, _SIZE)),
        lambda v, r, t: _same(v, [sum(_numbers(t))]),
    ),
    "all_gather of objects": Operation(
        lambda r, t: idist.all_gather({"n": _number(r, t)}),
        lambda v, r, t: v == [{"n": n} for n in _numbers(t)],
    ),
    "all_gather of large objects": Operation(
        lambda r, t: idist.all_gather(str(_number(r, t)) * _SIZE),
        lambda v, r, t: v == [str(n) * _SIZE for n in _numbers(t)],
    ),
    "all_gather of tensors": Operation(
        lambda r, t: idist.all_gather(_tensor(r, t, _SIZE)), lambda v, r, t: _same(v, _numbers(t))
    ),
    "broadcast": Operation(
        lambda r, t: idist.broadcast(_number(r, t), src=0), lambda v, r, t: v == _number(0, t)
    ),
    "broadcast_": Operation(
        lambda r, t: idist.broadcast_(_tensor(r, t, _SIZE), src=1),
        lambda v, r, t: _same(v, [_number(1, t)]),
    ),
    "reduce": Operation(
        lambda r, t: idist.reduce(_tensor(r, t), dst=0),
        lambda v, r, t: v is None if r else _same(v, [sum(_numbers(t))]),
    ),
    "gather": Operation(
        lambda r, t: idist.gather(_number(r, t), dst=0),
        lambda v, r, t: v is None if r else v == _numbers(t),
    ),
    "scatter": Operation(
        lambda r, t: idist.scatter(_numbers(t) if r == 0 else None, src=0),
        lambda v, r, t: v == _number(r, t),
    ),
    "reduce_scatter": Operation(
        lambda r, t: idist.reduce_scatter(_tensor(r, t)),
        lambda v, r, t: _same(v, [sum(_numbers(t))]),
    ),
    "all_to_all": Operation(
        lambda r, t: idist.all_to_all([_number(r, t)] * 2), lambda v, r, t: v == _numbers(t)
    ),
    "barrier": Operation(lambda r, t: idist.barrier(), lambda v, r, t: v is None),
    "messages": Operation(_message, lambda v, r, t: v == ((0, t) if r else None)),
    "new_group": Operation(
        lambda r, t: idist.all_gather(_number(r, t), group=idist.new_group([0, 1])),
        lambda v, r, t: v == _numbers(t),
    ),
    "one_rank_first": Operation(_section, lambda v, r, t: v == t),
    "handles": Operation(
        _started,
        lambda v, r, t: v[0] == _numbers(t) and _same(v[1], [sum(_numbers(t))]) and v[2] is None,
    ),
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
    begin = time.monotonic()
    try:
        value = _interrupted(trial, rank, operation, report)
        if not operation.is_right(value, rank, trial.tag):
            report.wrong = f"gave {str(value)[:200]}"
    except trial.error:
        report.was_interrupted = True
    except UnisonoError as error:
        report.said = f"{type(error).__name__}: {error}"
    except BaseException as error:
        report.wrong = f"raised {type(error).__name__}: {error}"
    try:
        found = idist.all_reduce(trial.tag << 8 * rank, "XOR")  # as no operation above
        if found != trial.tag ^ trial.tag << 8:
            report.wrong += f"; the next call gave {str(found)[:200]}"
    except UnisonoError as error:
        report.said += f" / {type(error).__name__}: {error}"
    except BaseException as error:
        report.wrong += f"; the next call raised {type(error).__name__}: {error}"
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
