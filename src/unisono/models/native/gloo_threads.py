"""Gloo's threads at the end of a group: they let go of an operation's tensors a moment after it.

Where such a thread is the last to hold a tensor that has a Python object, it waits for the
interpreter. A group that is destroyed meanwhile waits for its threads, and in torch 2.6 keeps the
interpreter: a deadlock. A program that ends meanwhile aborts: "terminate called without an active
exception" (CPython ends threads that wait then, out of a destructor of torch that may not be left).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from pathlib import Path

import torch

_MOST_S = 0.5
_IDLE_LOOKS = 3
_THREADS = Path("/proc/self/task")
# As torch names them; it didn't in 2.6, where every other thread may be one.
_NAME = "(pt_gloo_runloop)" if torch.__version__ >= "2.7" else ""


def settle_at_exit() -> None:
    """Let gloo's threads let go of what they hold before the interpreter ends."""
    atexit.unregister(settle)
    atexit.register(settle)


def settle() -> None:
    """Wait until gloo's threads hold nothing that needs the interpreter: milliseconds."""
    until, looks = time.monotonic() + _MOST_S, 0
    while (states := _states()) and looks < _IDLE_LOOKS and time.monotonic() < until:
        time.sleep(0.001)  # which gives them the interpreter
        looks = 0 if "R" in states else looks + 1


def _states() -> list[str]:
    """Give the state of each of gloo's threads, as the kernel writes it."""
    states = []
    try:
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                stat = (thread / "stat").read_text()
                if _NAME in stat and thread.name != str(threading.get_native_id()):
                    states.append(stat.rpartition(")")[2].split()[0])
    except FileNotFoundError:  # this isn't Linux
        return []
    return states
