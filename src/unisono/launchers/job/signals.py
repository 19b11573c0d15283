"""Effects of a process's signals on the ranks that this process has started.

SIGTERM and SIGHUP give ranks time to save: they get the signal, and the process that started them
waits. SIGINT gives ranks one second. A further signal, or the end of that time, ends them at once.
All other signals are only forwarded, for the program to handle.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from unisono.launchers.job.forkserver import OF_RANKS

TO_SAVE = (signal.SIGTERM, signal.SIGHUP)
TO_END = (signal.SIGINT, *TO_SAVE)
OTHERS = tuple(sorted(OF_RANKS - {*TO_END}))
END_S = 1.0  # until programs without time to save are killed
_SIGACTION_BYTES = 256  # no less than the size of C's struct
# A second signal within this time is a repeat: Slurm and systemd signal all processes of a job.
_TWICE_S = 1.0


class SignalledError(BaseException):
    """Raised in the main thread by the signals that end a job."""


@dataclass(slots=True)
class Orders:
    """The signals to end that a process with ranks received, and those that its ranks get."""

    grace_s: float
    received: list[int] = field(default_factory=list)
    began_at: float | None = None
    until: float | None = None

    def take(self, number: int, is_orphan: bool = False) -> int:
        """Record a signal; return the one for the ranks, 0 for none."""
        now = time.monotonic()
        if number not in TO_END:  # only forwarded
            return number
        self.received.append(number)
        is_to_save = number in TO_SAVE and not is_orphan  # the job of an orphan is over
        if self.began_at is None:
            self.began_at, self.until = now, now + (self.grace_s if is_to_save else END_S)
            return number
        if is_to_save and now < self.began_at + _TWICE_S:  # a repeat of the first one
            return 0
        self.until = now  # the grace time is over
        return signal.SIGKILL


@contextlib.contextmanager
def handled(numbers: Iterable[int], handle: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle signals in the block, except those that this process ignores or handles."""
    # An ignored signal stays ignored, as after ``nohup`` or a shell's ``&``. Afterwards handlers
    # are as before. Only the main thread can set handlers; in other threads this does nothing.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    taken = {number: handler for number, handler in before.items() if _is_free(number, handler)}
    try:
        for number in taken:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def _is_free(number: int, handler: Any) -> bool:
    """Return whether a signal has no handler but Python's own, or that of `signals`."""
    if handler is signal.SIG_DFL:
        return not _is_caught_in_c(number)
    is_ours = getattr(handler, "__module__", "") == __name__
    return is_ours or handler is signal.default_int_handler


def _is_caught_in_c(number: int) -> bool:
    """Return whether a library has a handler that Python doesn't know, such as faulthandler's."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    ctypes.pythonapi.sigaction(number, None, action)
    return any(action.raw[: ctypes.sizeof(ctypes.c_void_p)])  # its first field is the handler


@contextlib.contextmanager
def signals(is_once: bool = False) -> Iterator[list[int]]:
    """Raise an exception in the block at the signals that end a program."""
    seen: list[int] = []

    def stop(number: int, _: Any) -> None:
        seen.append(number)
        if is_once and len(seen) > 1:  # the block may be ending ranks by now
            return
        raise SignalledError(number)

    with handled(TO_END, stop):
        yield seen
