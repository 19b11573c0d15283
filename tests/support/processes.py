"""Processes that a test starts: their output, the lines that they send, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

import unisono

_FORK_S = 20.0
_LOOK_S = 0.01
_T = TypeVar("_T")

SOURCES = str(Path(unisono.__file__).parents[1])
"""The folder that this unisono is imported from."""
MARK = "UNISONO_TEST_MARK"
"""A variable by which a test recognizes its descendants."""


class Pipe:
    """A named pipe that any process can write lines into, and that the test reads."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "pipe")
        os.mkfifo(self.path)
        # Opened for writing too, so that no reader sees an end between two writers.
        self._stream = os.fdopen(os.open(self.path, os.O_RDWR), buffering=1)

    def read(self, count: int) -> list[str]:
        return [self._stream.readline().strip() for _ in range(count)]

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def say(path: str, line: object) -> None:
    """Write a line, in one piece, into a pipe."""
    with open(path, "wb", buffering=0) as stream:
        stream.write(f"{line}\n".encode())


def until(condition: Callable[[], _T], seconds: float) -> _T:
    """Wait until a condition holds, and return its value.

    Raises:
        AssertionError: it doesn't hold after `seconds`.
    """
    limit = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < limit, f"not within {seconds:g} s: {condition}"
        time.sleep(_LOOK_S)
    return value


def gone(pids: Iterable[int], within_s: float) -> list[int]:
    """Wait until processes have ended; kill those that haven't in time, and return their pids."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return [each.pid for each in _ended(lambda: [*filter(_is_alive, processes)], within_s)]


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process is running; ended orphans may stay zombies while init is busy."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def marked(mark: str, within_s: float) -> list[str]:
    """Wait until no other process has the mark; kill those that still have it, and list them."""
    left = _ended(lambda: _marked(mark), within_s)
    return [f"{each.pid} {each.info['cmdline']}" for each in left]


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
    return found


def _ended(living: Callable[[], list[psutil.Process]], within_s: float) -> list[psutil.Process]:
    with contextlib.suppress(AssertionError):
        until(lambda: not living(), within_s)
    left = living()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return left


def python(
    *args: str,
    text: str = "",
    cwd: Path | None = None,
    limit_s: float = 110.0,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that imports this unisono, with `env` as its variables if given."""
    return subprocess.run(
        [sys.executable, *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd,
        env={**(os.environ if env is None else env), "PYTHONPATH": SOURCES},
    )


def run_python(*args: str, text: str = "", cwd: Path | None = None) -> str:
    """Run an interpreter as `python` does; fail if it fails, and return what it printed."""
    done = python(*args, text=text, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def in_fork(call: Callable[[], object]) -> int:
    """Make a call in a fork of this process; return 0, or 1 if it raised."""
    while (code := _in_one_fork(call)) is None:
        pass
    return code


def _in_one_fork(call: Callable[[], object]) -> int | None:
    """Return the fork's exit code, or None if os.fork never returned in it, as in CPython 3.11.

    There the fork takes the lock of the list of threads, which a thread that ends may hold.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(theirs, b".")
            call()
            code = 0
        finally:
            os._exit(code)
    has_begun = bool(select.select([ours], [], [], _FORK_S)[0])
    os.close(ours)
    os.close(theirs)
    if not has_begun:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if has_begun else None


def read_terminal(leader: int) -> bytes:
    """Read a terminal's output until all others have closed it, and close it."""
    shown = b""
    with contextlib.suppress(OSError):  # EIO: no process has the other end any more
        while more := os.read(leader, 1 << 16):
            shown += more
    os.close(leader)
    return shown
