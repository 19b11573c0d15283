"""Runs of ``unisono run`` and of other launchers, as their users see them."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import MARK, SOURCES, marked, until

JOB = str(Path(__file__).parents[1] / "launch" / "job.py")
DIGITS = str(Path(__file__).parents[2] / "examples" / "digits.py")
UNISONO = (sys.executable, "-m", "unisono")
LIMIT_S = 150.0
GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class Done:
    """A command's exit code, output and duration."""

    code: int
    out: str
    err: str
    seconds: float

    def facts(self) -> list[dict[str, Any]]:
        """Return the facts that ranks printed, by rank; each line may begin with the rank."""
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
    path = os.pathsep.join(filter(None, (SOURCES, kept.get("PYTHONPATH"))))
    mine = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return {**kept, **mine, MARK: mark, **more}


def nobody_is_left(mark: str, limit_s: float = GONE_S) -> None:
    left = marked(mark, limit_s)
    assert not left


def run(words: Sequence[str], limit_s: float = LIMIT_S, /, **more: str) -> Done:
    """Run a command to its end, and check that none of its processes is left."""
    with started(words, **more) as job:
        begin = time.monotonic()
        try:
            code = job.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{job.out()}\n{job.err()}") from None
        done = Done(code, job.out(), job.err(), time.monotonic() - begin)
    return done


@dataclass(frozen=True, slots=True)
class Started:
    """A running command, with its output in files."""

    process: subprocess.Popen[bytes]
    mark: str
    files: tuple[Path, Path]

    @property
    def folder(self) -> Path:
        """Its working directory."""
        return self.files[0].parent

    def out(self) -> str:
        return self.files[0].read_text(errors="replace")

    def err(self) -> str:
        return self.files[1].read_text(errors="replace")

    def wait_for(self, text: str, count: int) -> None:
        until(lambda: self.out().count(text) >= count or self.process.poll() is not None, LIMIT_S)
        assert self.process.poll() is None, self.out() + self.err()

    def end(self, number: int, limit_s: float) -> int:
        os.kill(self.process.pid, number)
        return self.process.wait(limit_s)


@contextmanager
def started(words: Sequence[str], **more: str) -> Iterator[Started]:
    mark = more.pop(MARK, uuid.uuid4().hex)
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
            marked(mark, 0.0)


def learnt(text: str) -> tuple[str, float]:
    """Return the accuracy and the checksum that the digits example printed."""
    accuracy = re.search(r"held-out accuracy: ([\d.]+)", text)
    checksum = re.search(r"checksum of parameters: ([\d.]+)", text)
    assert accuracy, text
    assert checksum, text
    return accuracy[1], round(float(checksum[1]), 2)


@functools.cache
def learnt_alone(epochs: str) -> tuple[str, float]:
    """Return the accuracy and the checksum of the digits example in one process."""
    done = run([sys.executable, DIGITS, "--epochs", epochs])
    assert done.code == 0, done.err
    return learnt(done.out)
