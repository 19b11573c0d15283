"""Gloo's threads at the end of a group, which release an operation's tensors shortly after it.

To release a tensor that has a Python object they need the interpreter. Destroying a group
meanwhile waits for its threads, and in torch 2.6 holds the interpreter: a deadlock. A program
that exits meanwhile aborts: "terminate called without an active exception" (until Python 3.14,
CPython then ends threads that request it, out of a destructor of torch that must not be left).
"""

from __future__ import annotations

import atexit
import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

_MOST_S = 3.0  # less than a launcher's wait for the exit of its ranks
_THREADS = Path("/proc/self/task")
# An idle thread waits for a condition variable without a timeout, the call's fourth
# argument; gloo within an operation, and a thread that waits for the interpreter, have one.
_CONDITION = r"\d+ 0x\w+ 0x1?89 0x\w+ "
if torch.__version__ >= "2.7":
    _NAME, _BUSY = "pt_gloo_runloop\n", re.compile(f"(?!{_CONDITION}0x0 )")
else:  # torch doesn't name them: any thread that isn't Python's may be one
    _NAME, _BUSY = "", re.compile(f"running|{_CONDITION}0x[^0]")


def settle_at_exit() -> None:
    """Register a wait for gloo's threads before the interpreter exits."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """Wait until gloo's threads are idle, for at most `_MOST_S`."""
    until = time.monotonic() + _MOST_S
    while any(map(_BUSY.match, _system_calls())) and time.monotonic() < until:
        time.sleep(0.001)  # yields the interpreter to them


def _system_calls() -> Iterator[str]:
    """Return the system call of each of gloo's threads, as the kernel formats it."""
    others = {str(thread.native_id) for thread in threading.enumerate()}
    with contextlib.suppress(FileNotFoundError):  # this isn't Linux
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # it has exited
                if thread.name not in others and (thread / "comm").read_text().startswith(_NAME):
                    yield (thread / "syscall").read_text()
