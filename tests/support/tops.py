"""Jobs that hang in one of twelve ways, and checks of the report of ``unisono top``."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import unisono as idist
from tests.support import hangs
from tests.support.command import Started, started
from tests.support.hangs import LATE, SIZE
from tests.support.processes import until
from tests.support.screens import run
from unisono.errors import WorkerFailedError
from unisono.observe.jobs import Meter, look
from unisono.observe.report import reports

LIMIT_S = 120.0
ANSWER_S = 2.0
"""CPU seconds that a report may take; its wall-clock time may be longer on a busy machine."""
VERDICTS = {
    "dead": "dead",
    "stopped": "stopped",
    "extra_call": "extra call",
    "mismatch": "mismatch",
    "other_group": "deadlock",
}
_forks = multiprocessing.get_context("forkserver")


def seen() -> dict[str, Any]:
    """Look until the report of the one job names a culprit; return it."""

    def clear() -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = reports(look(Meter()))["jobs"]
        return [job for job in jobs if job["culprits"]]

    return until(clear, LIMIT_S)[0]


def told() -> dict[str, Any]:
    """Return the report of the command, after a check of the CPU time that it took."""
    seen()
    before = time.process_time()
    done = run("top", "--once", "--json")
    assert time.process_time() - before < ANSWER_S
    assert done.code == 0, done.err
    (job,) = json.loads(done.out)["jobs"]
    return dict(job)


def check(kind: str, job: Mapping[str, Any]) -> None:
    assert job["verdict"]["kind"] == VERDICTS.get(kind, "late"), job
    assert [each["rank"] for each in job["culprits"]] == [LATE], job["culprits"]
    (culprit,) = job["culprits"]
    assert Path(culprit["file"]).name == "hangs.py", culprit
    if lines := hangs.lines_of(kind):
        is_last_call = culprit["from"] == "last call"  # of one that is stopped
        has_another = is_last_call and kind in ("stopped", "dead")
        assert culprit["line"] in lines or has_another, culprit


def hangs_on(backend: str) -> list[str]:
    """List the kinds that hang on a backend."""
    return [kind for kind in hangs.KINDS if (kind, backend) not in hangs.ENDS]


def ends_on(backend: str) -> list[str]:
    """List the kinds with which a job of a backend ends at once."""
    return [kind for kind in hangs.KINDS if (kind, backend) in hangs.ENDS]


def check_end(kind: str, backend: str) -> None:
    """Run a job that ends at once, and find rank 1 in its error."""
    with job_of_program(kind, backend) as job:
        until(lambda: job.process.poll() is not None, LIMIT_S)
        assert hangs.is_blamed(kind, job.err()), job.err()


def end_ranks() -> bool:
    """Kill all processes with status pages here; return False, for conditions that repeat this."""
    for job in look(Meter()):
        for each in job.ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.pid)
                for child in (*process.children(recursive=True), process):
                    child.kill()
    return False


@contextmanager
def job_of_program(kind: str, backend: str) -> Iterator[Started]:
    """Run a job that hangs as a separate program."""
    words = [sys.executable, "-m", "tests.support.hangs", backend, kind]
    root = Path(hangs.__file__).parents[2]
    with started(words, PYTHONPATH=os.pathsep.join([str(root), *sys.path])) as job:
        try:
            yield job
        finally:
            until(lambda: end_ranks() or job.process.poll() is not None, LIMIT_S)


@contextmanager
def job_of_fork(kind: str, backend: str) -> Iterator[None]:
    """Run such a program in a fork of the fork server, after ``by_hand.prepare()``."""
    program = _forks.Process(target=_be, args=(dict(os.environ), backend, kind))
    program.start()
    try:
        yield
    finally:
        until(lambda: end_ranks() or not program.is_alive(), LIMIT_S)


def _be(environ: Mapping[str, str], *words: str) -> None:
    os.environ.update(environ)
    hangs.main(*words)


@contextmanager
def job_of_processes(kind: str, backend: str = "gloo") -> Iterator[None]:
    """Run a job that hangs from a thread of this process, whose fork server has loaded torch."""

    def spawn() -> None:
        with pytest.raises(WorkerFailedError):
            idist.spawn(backend, hangs.work, (kind,), nproc_per_node=SIZE)

    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(spawn)
        try:
            yield
        finally:
            until(lambda: end_ranks() or running.done(), LIMIT_S)
            running.result()
