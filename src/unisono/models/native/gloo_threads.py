"""Gloo's threads at the end of a group: they let go of an operation's tensors a moment after it.

A tensor that has a Python object needs the interpreter for that. A group that is destroyed
meanwhile waits for its threads, and in torch 2.6 keeps the interpreter: a deadlock. A program that
ends meanwhile aborts: "terminate called without an active exception" (until Python 3.14, CPython
ends threads that ask for it then, out of a destructor of torch that may not be left).
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

_MOST_S = 3.0  # less than a launcher waits for the end of its ranks
_THREADS = Path("/proc/self/task")
# A thread with nothing to do waits for a condition variable without a timeout, the call's fourth
# argument; gloo within an operation, and who asks for the interpreter, have one.
_CONDITION = r"\d+ 0x\w+ 0x1?89 0x\w+ "
if torch.__version__ >= "2.7":
    _NAME, _BUSY = "pt_gloo_runloop\n", re.compile(f"(?!{_CONDITION}0x0 )")
else:  # torch doesn't name them: every thread that isn't Python's may be one
    _NAME, _BUSY = "", re.compile(f"running|{_CONDITION}0x[^0]")


def settle_at_exit() -> None:
    """Let gloo's threads let go of what they hold before the interpreter ends."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """Wait until gloo's threads have nothing to do, for `_MOST_S` at most."""
    until = time.monotonic() + _MOST_S
    while any(map(_BUSY.match, _system_calls())) and time.monotonic() < until:
        time.sleep(0.001)  # which gives them the interpreter


def _system_calls() -> Iterator[str]:
    """Return what each of gloo's threads waits in, as the kernel writes it."""
    others = {str(thread.native_id) for thread in threading.enumerate()}
    with contextlib.suppress(FileNotFoundError):  # this isn't Linux
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if thread.name not in others and (thread / "comm").read_text().startswith(_NAME):
                    yield (thread / "syscall").read_text()
