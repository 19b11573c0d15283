"""``unisono top`` on jobs that hang: it names the rank and the line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import hangs
from tests.support.command import environ, nobody_is_left, started, wait_until
from tests.support.hangs import KINDS, SIZE
from tests.support.processes import python
from tests.support.tops import (
    LIMIT_S,
    check,
    end_ranks,
    job_of_processes,
    own_pages,
    seen,
    told,
    top,
)
from unisono.observe.jobs import Meter
from unisono.observe.report import reports

__all__ = ("own_pages",)

OF_PROCESSES = ("dead", "stopped", "mismatch")  # threads share their process, and always compare
pytestmark = pytest.mark.usefixtures("own_pages")


@contextmanager
def job_by_hand(backend: str, kind: str, tmp_path: Path, mark: str) -> Iterator[None]:
    """Run each rank as a program, as nobody's job who would end the others."""
    words = [sys.executable, "-m", "tests.support.hangs", backend, kind]
    root = Path(hangs.__file__).parents[2]
    store = str(tmp_path / "store")
    processes = [
        subprocess.Popen([*words, str(rank), store], env=environ(mark), cwd=root)
        for rank in range(SIZE)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        nobody_is_left(mark)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dead", "mismatch")])
def test_the_rank_that_hangs_is_named_with_its_line(kind: str) -> None:
    with job_of_processes(kind):
        check(kind, told())


def test_another_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where calls aren't compared, gloo itself waits forever."""
    monkeypatch.setenv("UNISONO_DEBUG", "0")
    monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")
    with job_of_processes("mismatch"):
        check("mismatch", told())


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    with job_by_hand("gloo", "dead", tmp_path, "top-dead"):
        check("dead", told())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OF_PROCESSES])
def test_a_rank_that_is_a_thread_is_named_with_its_line(kind: str) -> None:
    words = [sys.executable, "-m", "tests.support.hangs", "threads", kind]
    root = Path(hangs.__file__).parents[2]
    with started(words, PYTHONPATH=os.pathsep.join([str(root), *sys.path])):
        try:
            check(kind, told())
        finally:
            end_ranks()


def test_where_prints_equal_stacks_once_and_top_its_lines() -> None:
    with job_of_processes("locked"):
        job = seen()
        for words in ((), (job["job"],), (job["job"][:8],), (str(job["ranks"][2]["pid"]),)):
            done = python("-m", "unisono", "where", *words)
            assert done.returncode == 0, done.stderr
            waiting, _, late = done.stdout.partition("rank 1:\n")
            assert waiting.startswith("ranks 0, 2:\n")
            assert waiting.splitlines()[-1] == "  in barrier of all ranks, call 4"
            (line,) = hangs.lines_of("locked")
            assert late.splitlines()[-1] == f"  {hangs.__file__}:{line} in locked"
            assert "unisono/" not in late
        every = python("-m", "unisono", "where", "--all-threads").stdout
        assert len(every) >= len(done.stdout)
        text = top("--once").stdout
    assert text.startswith(f"job {job['job']}: ")
    assert "\nranks 0, 2 wait for rank 1\nculprit: rank 1 is idle outside of calls, at " in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert [row[0] for row in rows] == ["1", "0", "2"]
    assert {row[-1] for row in rows[1:]} == {f"hangs.py:{line + 1}"}


def test_a_job_without_a_fault_names_nobody() -> None:
    """All wait in one call for what isn't theirs: the page says so, and top too."""
    with job_of_processes("in_step"):

        def is_there() -> bool:
            found = reports(Meter())["jobs"]
            ranks = found[0]["ranks"] if found else []
            return [each["call"]["number"] for each in ranks if each["call"]] == [3, 3, 3]

        assert wait_until(is_there, LIMIT_S)
        (job,) = json.loads(top("--once", "--json").stdout)["jobs"]
        assert (job["verdict"]["kind"], job["culprits"]) == ("none", [])
        assert {each["state"] for each in job["ranks"]} == {"computes"}
