"""``unisono run`` on the real launchers: who the ranks are, where they meet, how all end."""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path

import psutil
import pytest

import unisono
from tests.launch.conftest import LAUNCHERS, all_save, ended_well
from tests.launch.test_nodes import free_port
from tests.support.command import GONE_S, JOB, LIMIT_S, UNISONO, nobody_is_left, run, started
from tests.support.processes import gone, until
from unisono.context import communicator

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def words(launcher: str, *more: str, n: int = 2) -> list[str]:
    return [*UNISONO, "run", "--launcher", launcher, "--nproc-per-node", str(n), *more]


def test_each_rank_knows_who_it_is_and_two_jobs_at_once_dont_meet(launcher: str) -> None:
    marks = [uuid.uuid4().hex, uuid.uuid4().hex]
    command = [*words(launcher, "--backend", "gloo", n=3), JOB, "facts"]
    with (
        started(command, UNISONO_TEST_MARK=marks[0]) as one,
        started(command, UNISONO_TEST_MARK=marks[1]) as other,
    ):
        for job, mark in zip((one, other), marks, strict=True):
            done = ended_well(job)
            found = done.facts()
            assert [fact["rank"] for fact in found] == [0, 1, 2]
            assert [fact["local_rank"] for fact in found] == [0, 1, 2]
            for fact in found:
                assert (fact["world_size"], fact["nproc_per_node"]) == (3, 3)
                assert (fact["node_rank"], fact["nnodes"]) == (0, 1)
                assert (fact["model"], fact["ranks"]) == ("native-dist", [0, 1, 2])
                assert fact["job"] == [mark] * 3
            assert done.out.count("DONE") == 3


@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("raise", 1, " raised ValueError: the failure\n"),
        ("exit", 7, "ended with exit code 7"),
        ("kill", 128 + 9, "was ended by SIGKILL"),
    ],
)
def test_the_first_failure_is_said_last_with_its_output(
    launcher: str, mode: str, code: int, said: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    done = run([*words(launcher, "--log-dir", str(logs)), JOB, mode, "gloo"])
    assert done.code == code, done.err
    _, error, last = done.err.rpartition("error: rank 1 of 2")
    assert error and said in last, done.err
    assert "\x1e" not in done.err + done.out
    assert "[1] last words to stdout\n" in done.out
    assert {file.name for file in logs.iterdir()} == {
        f"rank{rank}.{kind}" for rank in (0, 1) for kind in ("out", "err")
    }
    assert "last words to stdout" in (logs / "rank1.out").read_text()
    if mode != "raise":
        assert "last words to stderr" in last
        return
    place = r"  at \S+job\.py:\d+, in \w+ "
    place += r"\(local rank 1, host \S+, process \d+, exit code 1\)\n"
    assert re.fullmatch(place, last.removeprefix(said))
    assert "[1] KeyError: 'the cause'\n" in done.err
    assert "ValueError: the failure" in (logs / "rank1.err").read_text()


def test_a_rank_that_is_stopped_is_named_at_once(launcher: str) -> None:
    with started([*words(launcher), JOB, "stop", "gloo"]) as job:
        job.wait_for("READY", 1)
        said = r"warning: rank 1 of 2 was stopped by SIGSTOP, and continues after SIGCONT"
        until(lambda: re.search(said, job.err()), GONE_S)
        (pid,) = [int(pid) for pid in re.findall(r"READY (\d+)", job.out())]
        os.kill(pid, signal.SIGCONT)
        assert job.process.wait(60) == 0
        assert len(re.findall(said, job.err())) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_whose_wrapper_ends_is_named(number: int) -> None:
    with started([*words("processes", n=3), JOB, "wait", "gloo"]) as job:
        job.wait_for("READY", 3)
        programs = dict(re.findall(r"\[(\d)\] READY (\d+)", job.out()))
        server = psutil.Process(int(programs["1"])).ppid()
        children = sorted(child.pid for child in psutil.Process(job.process.pid).children())
        _, wrapper, _ = [pid for pid in children if pid != server]
        os.kill(wrapper, number)
        code = job.process.wait(20)
        nobody_is_left(job.mark)
        name = signal.Signals(number).name
        assert "error: rank 1 of 3 (local rank 1, host " in job.err()
        assert name in job.err().rpartition("error: ")[2]
        assert code == 128 + number


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("wait", signal.SIGINT),
        *[(mode, getattr(signal, f"SIG{name}")) for mode in ("stubborn", "stuck")
          for name in ("INT", "TERM", "KILL")],
    ],
)  # fmt: skip
def test_all_are_gone_soon_after_it_however_it_ends(launcher: str, mode: str, number: int) -> None:
    if launcher in ("slurm", "ray") and (mode == "stuck" or number == signal.SIGTERM):
        pytest.skip("its daemons end the ranks, in their own time")
    with started([*words(launcher, "--grace", "0.1"), JOB, mode, "gloo"]) as job:
        job.wait_for("READY", 2)
        ranks = [int(pid) for pid in re.findall(r"READY (\d+)", job.out())]
        os.kill(job.process.pid, number)
        assert not gone(ranks, {"mpi": 3.0, "slurm": 10.0, "ray": 20.0}.get(launcher, 2.0))
        code = job.process.wait(2 * GONE_S)
        nobody_is_left(job.mark, 20.0 if launcher == "ray" else 2 * GONE_S)
        if number == signal.SIGINT:
            assert code == 128 + signal.SIGINT
            assert "interrupted" in job.err()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ranks_have_time_to_save(launcher: str, number: int) -> None:
    with started([*words(launcher), JOB, "save", "gloo"]) as job:
        job.wait_for("READY", 2)
        job.process.send_signal(number)
        all_save(job)
        assert ("all ranks have left by themselves" in job.err()) == (number == signal.SIGTERM)


def test_ctrl_c_ends_ranks_that_save(launcher: str) -> None:
    with started([*words(launcher), JOB, "save", "gloo"]) as job:
        job.wait_for("READY", 2)
        ranks = [int(pid) for pid in re.findall(r"READY (\d+)", job.out())]
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("SAVING", 2)
        job.process.send_signal(signal.SIGINT)
        assert not gone(ranks, 20.0 if launcher == "ray" else 10.0)  # of 30 s
        assert job.process.wait(LIMIT_S) == 128 + signal.SIGTERM


PRIVATE = """
import os, sys, unisono
from unisono.context import communicator
unisono.initialize("gloo")
known = communicator().control.secret is not None  # before ranks could agree on one
print("PRIVATE", "UNISONO_PRIVATE_STORE" in os.environ, known, unisono.all_gather(known))
unisono.finalize()
for url in sys.argv[1:]:
    with unisono.Parallel("gloo", init_method=url) as parallel:
        print("SUM", parallel.run(lambda local_rank: unisono.all_reduce(1)))
"""


# Those whose ranks are all on this host.
on_one_host = pytest.mark.parametrize("launcher", LAUNCHERS[:3], indirect=True)


@on_one_host
def test_ranks_of_a_script_meet_where_only_their_user_can_come(
    launcher: str, tmp_path: Path
) -> None:
    """Unless they are given a URL, which works where a store is hosted, too."""
    script = tmp_path / "private.py"
    script.write_text(PRIVATE)
    urls = [] if launcher == "mpi" else [f"tcp://127.0.0.1:{free_port()}"]
    done = run(words(launcher, str(script), *urls))
    assert done.code == 0, done.err
    assert done.out.count("PRIVATE True True [True, True]") == 2
    assert done.out.count("SUM [2]") == 2 * len(urls)


@on_one_host
def test_ranks_of_a_function_meet_where_only_their_user_can_come(launcher: str) -> None:
    def fn(local_rank: int) -> tuple[bool, bool]:
        is_known = vars(communicator().control)["secret"] is not None
        return "UNISONO_PRIVATE_STORE" in os.environ, is_known

    found = unisono.spawn("gloo", fn, nproc_per_node=2, launcher=launcher)
    assert found == [(True, True)] * 2
