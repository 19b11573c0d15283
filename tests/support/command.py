"""Runs of ``unisono run`` and of other launchers, as their users see them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import unisono

SOURCES = Path(unisono.__file__).parents[1]
JOB = str(Path(__file__).parents[1] / "launch" / "job.py")
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
UNISONO = (sys.executable, "-m", "unisono")
LIMIT_S = 150.0
GONE_S = 5.0
_MARK = "UNISONO_TEST_MARK"


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left: its code and its words."""

    code: int
    out: str
    err: str
    seconds: float

    def facts(self) -> list[dict[str, Any]]:
        """Give what the ranks said of themselves, by rank; each line begins with the rank."""
        found = []
        for line in self.out.splitlines():
            head, separator, text = line.partition("FACTS ")
            if separator:
                fact = json.loads(text)
                assert head in (f"[{fact['rank']}] ", "")
                found.append(fact)
        return sorted(found, key=lambda fact: int(fact["rank"]))


def environ(mark: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join(filter(None, (str(SOURCES), kept.get("PYTHONPATH"))))
    mine = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return {**kept, **mine, _MARK: mark, **more}


def processes_with(mark: str) -> list[Any]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_over = process.status() == psutil.STATUS_ZOMBIE
            if not is_over and process.environ().get(_MARK) == mark:
                found.append(process)
    return found


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until(is_true: Callable[[], Any], limit_s: float) -> bool:
    limit = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


def nobody_is_left(mark: str, limit_s: float = GONE_S) -> None:
    is_empty = wait_until(lambda: not processes_with(mark), limit_s)
    left = processes_with(mark)
    words = [f"{process.pid} {process.cmdline()}" for process in left]
    for process in left:
        process.kill()
    assert is_empty, words


def run(words: Sequence[str], **more: str) -> Done:
    """Run a command to its end, and check that no process of it is left."""
    with started(words, **more) as job:
        begin = time.monotonic()
        try:
            code = job.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{job.out()}\n{job.err()}") from None
        done = Done(code, job.out(), job.err(), time.monotonic() - begin)
    return done


@dataclass(frozen=True, slots=True)
class Started:
    """A command that runs, its output in files."""

    process: subprocess.Popen[bytes]
    mark: str
    files: tuple[Path, Path]

    def out(self) -> str:
        return self.files[0].read_text(errors="replace")

    def err(self) -> str:
        return self.files[1].read_text(errors="replace")

    def wait_for(self, text: str, count: int) -> None:
        is_there = wait_until(
            lambda: self.out().count(text) >= count or self.process.poll() is not None, LIMIT_S
        )
        assert is_there and self.process.poll() is None, self.out() + self.err()

    def end(self, number: int, limit_s: float) -> int:
        os.kill(self.process.pid, number)
        return self.process.wait(limit_s)


@contextmanager
def started(words: Sequence[str], **more: str) -> Iterator[Started]:
    mark = more.pop(_MARK, uuid.uuid4().hex)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "out"), Path(folder, "err")
        with files[0].open("wb") as out, files[1].open("wb") as err:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ(mark, **more),
                cwd=folder,
                start_new_session=True,
            )
        try:
            yield Started(process, mark, files)
            nobody_is_left(mark)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            with contextlib.suppress(AssertionError):
                nobody_is_left(mark, 0.0)


def learnt(text: str) -> tuple[str, float]:
    """Read out of what the digits example printed what was learnt."""
    accuracy = re.search(r"held-out accuracy: ([\d.]+)", text)
    checksum = re.search(r"checksum of parameters: ([\d.]+)", text)
    assert accuracy, text
    assert checksum, text
    return accuracy[1], round(float(checksum[1]), 2)


@functools.cache
def learnt_alone(epochs: str) -> tuple[str, float]:
    """What the digits example learns in one process."""
    done = run([sys.executable, DIGITS, "--epochs", epochs])
    assert done.code == 0, done.err
    return learnt(done.out)
