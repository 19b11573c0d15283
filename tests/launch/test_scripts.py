"""``unisono run`` on the real launchers: who the ranks are, how failures are said, how all end."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.support.command import (
    DIGITS,
    GONE_S,
    JOB,
    UNISONO,
    is_alive,
    learnt,
    learnt_alone,
    nobody_is_left,
    run,
    started,
    wait_until,
)

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
Launcher = tuple[str, dict[str, str]]


def words(name: str, *more: str, n: int = 2) -> list[str]:
    return [*UNISONO, "run", "--launcher", name, "--nproc-per-node", str(n), *more]


def test_each_rank_knows_who_it_is(launcher: Launcher) -> None:
    name, variables = launcher
    done = run([*words(name, n=3), JOB, "facts", "gloo"], **variables)
    assert done.code == 0, done.err
    found = done.facts()
    assert [fact["rank"] for fact in found] == [0, 1, 2]
    assert [fact["local_rank"] for fact in found] == [0, 1, 2]
    for fact in found:
        assert (fact["world_size"], fact["nproc_per_node"]) == (3, 3)
        assert (fact["node_rank"], fact["nnodes"]) == (0, 1)
        assert (fact["model"], fact["ranks"]) == ("native-dist", [0, 1, 2])
    assert done.out.count("DONE") == 3


def test_backend_is_handed_on(launcher: Launcher) -> None:
    name, variables = launcher
    done = run([*words(name, "--backend", "gloo"), JOB, "facts"], **variables)
    assert done.code == 0, done.err
    assert [fact["model"] for fact in done.facts()] == ["native-dist"] * 2


def test_the_first_failure_is_said_last(launcher: Launcher, tmp_path: Path) -> None:
    name, variables = launcher
    done = run(
        [*words(name, "--log-dir", str(tmp_path / "logs")), JOB, "raise", "gloo"], **variables
    )
    assert done.code == 1
    _, error, said = done.err.rpartition("error: rank 1 of 2 raised ValueError: the failure\n")
    assert error, done.err
    assert re.match(
        r"  at \S+job\.py:\d+, in \w+ "
        r"\(local rank 1, host \S+, process \d+, exit code 1\)\n\nTraceback",
        said,
    )
    assert said.rstrip().endswith("ValueError: the failure")
    assert "KeyError: 'the cause'" in said
    assert "\x1e" not in done.err + done.out
    assert "[1] last words to stdout\n" in done.out
    logs = tmp_path / "logs"
    assert {file.name for file in logs.iterdir()} == {
        f"rank{rank}.{kind}" for rank in (0, 1) for kind in ("out", "err")
    }
    assert "last words to stdout" in (logs / "rank1.out").read_text()
    assert "ValueError: the failure" in (logs / "rank1.err").read_text()


def test_exit_code_is_the_ranks_own(launcher: Launcher) -> None:
    name, variables = launcher
    done = run([*words(name), JOB, "exit", "gloo"], **variables)
    assert done.code == 7, done.err
    assert "error: rank 1 of 2" in done.err
    assert "ended with exit code 7" in done.err


def test_a_killed_rank_is_named_with_its_signal_and_output(launcher: Launcher) -> None:
    name, variables = launcher
    done = run([*words(name), JOB, "kill", "gloo"], **variables)
    assert done.code == 128 + signal.SIGKILL, done.err
    assert "error: rank 1 of 2" in done.err
    assert "was ended by SIGKILL" in done.err
    assert "[1] last words to stdout\n" in done.out
    assert "last words to stderr" in done.err.rpartition("error: ")[2]


def test_a_rank_that_is_stopped_is_named_at_once(launcher: Launcher) -> None:
    name, variables = launcher
    with started([*words(name), JOB, "stop", "gloo"], **variables) as job:
        job.wait_for("READY", 1)
        said = r"warning: rank 1 of 2 was stopped by SIGSTOP, and goes on after SIGCONT"
        assert wait_until(lambda: re.search(said, job.err()) is not None, GONE_S)
        (pid,) = [int(pid) for pid in re.findall(r"READY (\d+)", job.out())]
        os.kill(pid, signal.SIGCONT)
        assert job.process.wait(60) == 0
        assert len(re.findall(said, job.err())) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_whose_wrapper_ends_is_named(number: int) -> None:
    with started([*words("processes", n=3), JOB, "wait", "gloo"]) as job:
        job.wait_for("READY", 3)
        programs = dict(re.findall(r"\[(\d)\] READY (\d+)", job.out()))
        wrapper = psutil.Process(int(programs["1"])).ppid()
        os.kill(wrapper, number)
        code = job.process.wait(20)
        nobody_is_left(job.mark)
        name = signal.Signals(number).name
        assert "error: rank 1 of 3 (local rank 1, host " in job.err()
        assert name in job.err().rpartition("error: ")[2]
        assert code == 128 + number


@pytest.mark.parametrize("mode", ["wait", "stubborn"])
def test_interrupted_once_all_are_gone(launcher: Launcher, mode: str) -> None:
    name, variables = launcher
    with started([*words(name), JOB, mode, "gloo"], **variables) as job:
        job.wait_for("READY", 2)
        code = job.end(signal.SIGINT, 2 * GONE_S)
        nobody_is_left(job.mark)
        assert code == 128 + signal.SIGINT
        assert "interrupted" in job.err()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("mode", ["stubborn", "stuck"])
def test_ranks_that_are_stuck_are_gone_within_two_seconds(
    launcher: Launcher, mode: str, number: int
) -> None:
    name, variables = launcher
    if name in ("slurm", "ray"):
        pytest.skip("its daemons end the ranks, in their own time; so does mpirun, within 3 s")
    with started([*words(name), JOB, mode, "gloo"], **variables) as job:
        job.wait_for("READY", 2)
        ranks = [int(pid) for pid in re.findall(r"READY (\d+)", job.out())]
        begin = time.monotonic()
        os.kill(job.process.pid, number)
        assert wait_until(lambda: not any(map(is_alive, ranks)), GONE_S)
        assert time.monotonic() - begin < (3.0 if name == "mpi" else 2.0)
        job.process.wait(GONE_S)


def test_killed_it_leaves_nobody(launcher: Launcher) -> None:
    name, variables = launcher
    with started([*words(name), JOB, "stubborn", "gloo"], **variables) as job:
        job.wait_for("READY", 2)
        job.end(signal.SIGKILL, GONE_S)
        nobody_is_left(job.mark, 20.0 if name == "ray" else 2 * GONE_S)


def test_two_jobs_at_once_dont_meet(launcher: Launcher) -> None:
    name, variables = launcher
    marks = [uuid.uuid4().hex, uuid.uuid4().hex]
    command = [*words(name), JOB, "facts", "gloo"]
    with (
        started(command, UNISONO_TEST_MARK=marks[0], **variables) as one,
        started(command, UNISONO_TEST_MARK=marks[1], **variables) as other,
    ):
        for job, mark in zip((one, other), marks, strict=True):
            assert job.process.wait(200) == 0, job.err()
            facts = [line for line in job.out().splitlines() if "FACTS" in line]
            assert len(facts) == 2
            assert all(line.count(mark) == 2 for line in facts)


def test_digits_learn_the_same_on_each(launcher: Launcher) -> None:
    name, variables = launcher
    done = run([*words(name, "--backend", "gloo"), DIGITS, "--epochs", "2"], **variables)
    assert done.code == 0, done.err
    assert learnt(done.out) == learnt_alone("2")
    assert "rank 0 on" in done.out
    assert "rank 1 on" in done.out
