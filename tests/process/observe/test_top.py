"""``unisono top`` on jobs that hang: it names the rank and the line."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import unisono as idist
from tests.support import hangs
from tests.support.command import environ, nobody_is_left, started, wait_until
from tests.support.hangs import KINDS, LATE, SIZE
from tests.support.processes import python
from unisono.errors import WorkerFailedError
from unisono.observe.jobs import Meter, look
from unisono.observe.report import reports

LIMIT_S = 120.0
ANSWER_S = 2.0
VERDICTS = {
    "dead": "dead",
    "stopped": "stopped",
    "extra_call": "extra call",
    "mismatch": "mismatch",
    "other_group": "deadlock",
}
OF_PROCESSES = ("dead", "stopped", "mismatch")  # threads share their process, and always compare


@pytest.fixture(autouse=True)
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests see the pages of their own jobs alone."""
    folder = tmp_path / "pages"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("UNISONO_STATUS", str(folder))


def top(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "unisono", "top", *words)


def seen() -> dict[str, Any]:
    """Look until what the one job is held up by has become clear."""
    found: list[dict[str, Any]] = []

    def is_clear() -> bool:
        found[:] = reports(Meter())["jobs"]
        return bool(found and found[0]["culprits"])

    assert wait_until(is_clear, LIMIT_S), [
        (each.rank, look(Meter())) for job in look(Meter()) for each in job.ranks
    ]
    return found[0]


def told() -> dict[str, Any]:
    """Have the command tell it, with less work than it has time for."""
    seen()
    before = _work_s()
    done = top("--once", "--json")
    assert _work_s() - before < ANSWER_S
    assert done.returncode == 0, done.stderr
    (job,) = json.loads(done.stdout)["jobs"]
    return dict(job)


def _work_s() -> float:
    """Tell what commands have cost: on a busy machine they take longer than that."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check(kind: str, job: dict[str, Any]) -> None:
    assert job["verdict"]["kind"] == VERDICTS.get(kind, "late"), job
    assert [each["rank"] for each in job["culprits"]] == [LATE], job["culprits"]
    (culprit,) = job["culprits"]
    assert Path(culprit["file"]).name == "hangs.py", culprit
    if lines := hangs.lines_of(kind):
        is_last_call = culprit["from"] == "last call"  # of one that is stopped, without py-spy
        assert culprit["line"] in lines or (is_last_call and kind == "stopped"), culprit


def end_ranks() -> bool:
    """Kill all processes that have pages here; false, to be called until something else is true."""
    for job in look(Meter()):
        for each in job.ranks:
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                for child in psutil.Process(each.rank.pid).children(recursive=True):
                    child.kill()
                os.kill(each.rank.pid, signal.SIGKILL)
    return False


@contextmanager
def job_of_processes(kind: str) -> Iterator[None]:
    """Run a job that hangs, from this process, whose helper has torch already."""

    def run() -> None:
        with pytest.raises(WorkerFailedError):
            idist.spawn("gloo", hangs.work, (kind,), nproc_per_node=SIZE)

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(run)
        try:
            yield
        finally:
            assert wait_until(lambda: end_ranks() or running.done(), LIMIT_S)
            running.result()


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
