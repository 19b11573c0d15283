"""``unisono top`` on jobs that hang: it names the rank and the line, on the full screen too."""

from __future__ import annotations

import json
import re
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import unisono as idist
from tests.support import by_hand, hangs
from tests.support.hangs import BY_HAND, VARIABLES
from tests.support.processes import python, until
from tests.support.screens import picture, run, top_in_terminal
from tests.support.tops import (
    ANSWER_S,
    LIMIT_S,
    check,
    ends_on,
    hangs_on,
    job_of_fork,
    job_of_processes,
    seen,
    told,
)
from unisono.errors import CollectiveError, WorkerFailedError
from unisono.observe.jobs import Meter, look
from unisono.observe.report import StackCache, report_of, reports

pytestmark = pytest.mark.usefixtures("own_pages")
SHOWN, HIDDEN = "\x1b[?1049h", "\x1b[?1049l"
NO_JOB = "no job of this user was found"
NAMED, WHICH = "culprit: rank 1", "stacks of which rank? [1]"


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    by_hand.prepare()


@pytest.mark.parametrize("kind", hangs_on("gloo"))
def test_the_rank_that_hangs_is_named_with_its_line(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.get((kind, "gloo"), {}).items():
        monkeypatch.setenv(name, value)
    is_by_hand = (kind, "gloo") in BY_HAND
    with job_of_fork(kind, "gloo") if is_by_hand else job_of_processes(kind):
        check(kind, told())


@pytest.mark.parametrize("kind", hangs_on("threads"))
def test_a_rank_that_is_a_thread_is_named_with_its_line(kind: str) -> None:
    with job_of_fork(kind, "threads"):
        check(kind, told())


@pytest.mark.parametrize("kind", ends_on("threads"))
def test_a_job_of_threads_that_does_not_hang_names_the_rank_as_it_ends(kind: str) -> None:
    with pytest.raises((CollectiveError, WorkerFailedError)) as caught:
        idist.spawn("threads", hangs.work, (kind,), nproc_per_node=hangs.SIZE)
    assert hangs.is_blamed(kind, f"{caught.typename}: {caught.value}")


def test_who_comes_early_has_not_made_a_call_too_many() -> None:
    with job_of_processes("early"):
        job = told()
    assert (job["verdict"]["kind"], job["verdict"]["text"]) == (
        "late",
        "rank 1 waits for ranks 0, 2",
    )
    assert [each["rank"] for each in job["culprits"]] == [0, 2]
    assert {each["line"] for each in job["culprits"]} == hangs.lines_of("early")


def test_a_rank_that_stays_where_it_is_is_asked_once() -> None:
    """To ask it interrupts what waits in C there; what it has written says how often it was."""
    with job_of_processes("locked"):
        seen()
        (job,) = look(Meter())
        late, asked = job.ranks[hangs.LATE], StackCache()
        written = Path(f"/proc/{late.pid}/fd/{late.facts['stacks_fd']}")
        (first,) = report_of(job, asked)["culprits"]
        n_bytes = written.stat().st_size
        (again,) = report_of(job, asked)["culprits"]
        assert written.stat().st_size == n_bytes
        assert again["stack"] == first["stack"] != []
        assert again["told_s"] > first["told_s"] >= 0.0
        calls = (*late.calls[:-1], replace(late.calls[-1], begin_ns=job.facts["made_ns"]))
        moved = replace(late, calls=calls)
        ranks = tuple(moved if each is late else each for each in job.ranks)
        report_of(replace(job, ranks=ranks), asked)
        assert written.stat().st_size > n_bytes


def test_where_prints_equal_stacks_once_and_top_its_lines() -> None:
    (line,) = hangs.lines_of("locked")
    with job_of_processes("locked"):
        job = seen()
        for words in ((), (job["job"],), (job["job"][:8],), (str(job["ranks"][2]["pid"]),)):
            done = run("where", *words)
            assert done.code == 0, done.err
            waiting, _, late = done.out.partition("rank 1:\n")
            assert waiting.startswith("ranks 0, 2:\n")
            assert waiting.splitlines()[-1] == "  in barrier of all ranks, call 4"
            assert late.splitlines()[-1] == f"  {hangs.__file__}:{line} in locked"
            assert "unisono/" not in late
        assert len(run("where", "--all-threads").out) >= len(done.out)
        text = run("top", "--once").out
        waits, ok = (run("top", "--check", "--waited", text) for text in ("0", "3600"))
    assert (waits.code, waits.out.partition(":")[0]) == (1, f"job {job['job']}")
    assert (ok.code, ok.out) == (0, "no rank has waited longer than 3600 s\n")
    assert text.startswith(f"job {job['job']}: ")
    assert "\nranks 0, 2 wait for rank 1\nculprit: rank 1 is idle outside of calls, at " in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert [row[0] for row in rows] == ["1", "0", "2"]
    (line,) = hangs.lines_of("all")
    assert {row[-1] for row in rows[1:]} == {f"hangs.py:{line}"}


@pytest.mark.fast
def test_a_job_without_a_fault_names_nobody() -> None:
    """All wait in one call for what isn't theirs: the page says so, and top too, as a program."""
    with job_of_processes("in_step"):

        def is_there() -> bool:
            found = reports(look(Meter()))["jobs"]
            ranks = found[0]["ranks"] if found else []
            return [each["call"]["number"] for each in ranks if each["call"]] == [3, 3, 3]

        until(is_there, LIMIT_S)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python("-m", "unisono", "top", "--once", "--json")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (job,) = json.loads(done.stdout)["jobs"]
    assert (job["verdict"]["kind"], job["culprits"]) == ("none", [])
    assert {each["state"] for each in job["ranks"]} == {"computes"}
    work_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert work_s < ANSWER_S


def test_keys_show_stacks_and_end_the_job_and_the_terminal_is_as_it_was() -> None:
    with top_in_terminal("--every", "0.3") as screen:
        screen.wait_for(NO_JOB)  # it waits for one
        with job_of_processes("locked"):
            text = screen.wait_for(NAMED, "rank 1 is idle", "waits for rank 1")
            assert re.search(r"hangs\.py:\d+ locked", text)
            assert "q quit" in text
            screen.press("s", WHICH)
            assert "in locked" in screen.press("\n", "rank 1:", "in work")
            screen.press("x", NAMED)
            screen.press("s", WHICH)
            screen.press("7\r", "there isn't a rank 7 here")
            screen.press("x", NAMED)
            screen.press("a", "ranks 0, 2:", "in barrier of all ranks")
            text = screen.press("\x1b[B", "rank 1:", "in locked", hidden="ranks 0, 2:")
            assert "ranks 0, 2:" not in text  # one line down
            screen.press("x", NAMED)
            assert "culprit:" in picture(screen.frame())
            screen.press("k", "end the 3 ranks of job")
            screen.press("\r", NAMED)  # the default is no
            screen.press("k", "end the 3 ranks of job")
            screen.press("y\r", NO_JOB)
        screen.press("q")
        written = screen.rest()
        assert screen.process.wait() == 0
    assert written.index(SHOWN) < written.index(HIDDEN)
    assert "\x1b[?25h" in written[written.index(HIDDEN) - 200 :]  # the cursor is back


def test_ctrl_c_ends_it() -> None:
    with top_in_terminal() as screen:
        screen.wait_for(NO_JOB)
        screen.process.send_signal(signal.SIGINT)
        written = screen.rest()
        assert screen.process.wait() == 130
    assert HIDDEN in written
