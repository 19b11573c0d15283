"""What processes tell a test: lines through a pipe, and that they have gone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

import unisono

__all__ = ("SOURCES", "Pipe", "gone", "run_python", "say")

SOURCES = str(Path(unisono.__file__).parents[1])
"""The folder that this unisono is imported from."""


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


def gone(pids: Iterable[int], within_s: float) -> list[int]:
    """Wait until processes have ended; give the ids of those that haven't in time."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    until = time.monotonic() + within_s
    while (alive := [p for p in processes if _is_alive(p)]) and time.monotonic() < until:
        threading.Event().wait(0.01)
    for process in alive:
        process.kill()
    return [process.pid for process in alive]


def _is_alive(process: psutil.Process) -> bool:
    """Tell whether a process runs; orphans that have ended wait for a busy init to bury them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def run_python(*args: str, text: str = "", cwd: Path | None = None) -> str:
    """Run an interpreter that finds this unisono, and give what it printed."""
    done = subprocess.run(
        [sys.executable, *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": SOURCES},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
