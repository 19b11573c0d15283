"""A process that hangs, and can show its stacks: ``python -m tests.support.hanging HOW``."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import until
from unisono.recording import stack_signal
from unisono.recording.status_page import start_ticks

_LIMIT_S = 60.0
_N_BESIDE = 2
_mutex = ctypes.create_string_buffer(64)  # all zeros: PTHREAD_MUTEX_INITIALIZER
ROOT = Path(__file__).parents[2]
THREADS_OF_C = 96
takes_stacks = pytest.mark.skipif(sys.version_info < (3, 11), reason="stacks take Python 3.11")


@dataclass(frozen=True, slots=True)
class Hanging:
    """The process, and the facts that its status page would have."""

    process: subprocess.Popen[str]
    facts: dict[str, Any]

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def threads(self) -> list[int]:
        """List its threads, the first one first."""
        return sorted(int(task.name) for task in Path(f"/proc/{self.pid}/task").iterdir())

    def stop(self) -> None:
        """Stop the process, and wait until it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)


def hang(how: str) -> None:
    """Hang until the process is ended."""
    for _ in range(_N_BESIDE if how in _BESIDE else 0):
        threading.Thread(target=_BESIDE[how][0], daemon=True).start()
    if how == "threads of C":
        _hang_in_c()
    if how in ("lock", "thread", *_BESIDE, "threads of C"):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    while how == "loop":
        pass
    python = ctypes.PyDLL(None)
    python.pthread_mutex_lock(_mutex)
    python.pthread_mutex_lock(_mutex)  # it keeps the interpreter lock


def _hang_in_c() -> None:
    """Start threads that hang in C, and never run Python."""
    mutex, thread, libc = _mutex, ctypes.c_ulong(), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    lock = ctypes.cast(libc.pthread_mutex_lock, ctypes.c_void_p)
    for _ in range(THREADS_OF_C):
        assert libc.pthread_create(ctypes.byref(thread), None, lock, mutex) == 0


def _wait() -> None:
    threading.Event().wait()


def _call() -> None:
    """Enter and leave so many frames that Python allocates and frees their memory."""
    while True:
        _count_down(400)


def _count_down(number: int) -> None:
    if number:
        _count_down(number - 1)


_BESIDE = {"calls": (_call, "in _c"), "locks": (_wait, "in _wait\n")}
"""Functions of the threads beside the one that hangs, and a text of their stacks."""


@contextmanager
def hanging(how: str) -> Iterator[Hanging]:
    """Start a process that hangs, and end it."""
    command = [sys.executable, "-m", "tests.support.hanging", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            hanging = Hanging(process, json.loads(process.stdout.readline()))
            until(lambda: _is_there(how, hanging), _LIMIT_S)
            yield hanging
        finally:
            process.kill()


def _is_there(how: str, hanging: Hanging) -> bool:
    """Return whether each thread that runs Python has arrived where it hangs."""
    own = hanging.facts["thread_id"]
    words = {own: "in hang\n"}
    if how in _BESIDE:
        words |= {each: _BESIDE[how][1] for each in hanging.threads() if each != own}
        if len(words) != 1 + _N_BESIDE:
            return False
    return all(
        word in (stack_signal.ask(hanging.pid, hanging.facts, thread, _LIMIT_S) or "")
        for thread, word in words.items()
    )


def _be(how: str) -> None:
    facts = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), **stack_signal.install()}
    facts["thread_id"] = threading.get_native_id()
    os.write(1, (json.dumps(facts) + "\n").encode())
    hang(how)


if __name__ == "__main__":
    if sys.argv[1] == "thread":
        threading.Thread(target=_be, args=("thread",)).start()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    else:
        _be(sys.argv[1])
