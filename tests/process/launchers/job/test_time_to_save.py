"""A signal to the process that started ranks: they save, and it goes on, or dies of the signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.command import LIMIT_S, Started, started
from unisono.launchers.job.signals import END_S

INT, TERM = signal.SIGINT, signal.SIGTERM
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import unisono as idist

runner, work, grace = sys.argv[1:]

def save(local_rank, has_handler=True):
    if has_handler:
        idist.preemption_point() if work == "save" else signal.signal(signal.SIGTERM, print)
    idist.barrier()
    print("READY", flush=True)
    while work == "save" and not idist.preemption_point():
        time.sleep(0.01)
    print("SAVING", flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    Path(f"saved{local_rank}").touch()
    return local_rank

def dies_alone(local_rank):
    return save(local_rank, local_rank == 0)

def dies(local_rank):
    return save(local_rank, False)

def ignores(local_rank):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return dies(local_rank)

own = lambda *_: Path("go").touch()
if work == "has_handler":
    has_handler = dies
    signal.signal(signal.SIGTERM, own)
before = signal.getsignal(signal.SIGTERM)
how, call = {"nproc_per_node": 2, "grace": float(grace)}, globals()[work]
if runner == "spawn":
    result = idist.spawn("gloo", call, **how)
else:
    with getattr(idist, runner)("gloo", **how) as ranks:
        result = ranks.run(call)
print("RESULT", result, signal.getsignal(signal.SIGTERM) is before, flush=True)
"""


@contextmanager
def ranks_of(runner: str, work: str, grace_s: float = 600.0) -> Iterator[Started]:
    with started([sys.executable, "-c", PROGRAM, runner, work, str(grace_s)]) as job:
        job.wait_for("READY", 2)
        yield job


def goes_on(job: Started) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(3 * END_S)


@pytest.mark.parametrize("runner", ["spawn", "WorkerPool"])
def test_ranks_save_and_the_program_goes_on(runner: str) -> None:
    with ranks_of(runner, "save") as job:
        job.process.send_signal(TERM)
        job.wait_for("SAVING", 2)
        goes_on(job)
        (job.folder / "go").touch()
        assert job.process.wait(LIMIT_S) == 0, job.err()
        assert "RESULT [0, 1] True" in job.out()


@pytest.mark.parametrize(
    ("runner", "work", "grace_s", "numbers"),
    [
        ("spawn", "dies", 600.0, [TERM]),  # over as soon as all are gone
        ("WorkerPool", "dies", 600.0, [TERM]),
        ("Parallel", "ignores", 0.5, [TERM]),
        ("WorkerPool", "ignores", 0.5, [TERM]),
        ("spawn", "ignores", 0.0, [TERM]),
        ("spawn", "ignores", 600.0, [TERM, INT]),
    ],
)
def test_the_program_dies_of_a_signal_that_ranks_do_not_survive(
    runner: str, work: str, grace_s: float, numbers: list[int]
) -> None:
    with ranks_of(runner, work, grace_s) as job:
        for number in numbers:
            job.process.send_signal(number)
        assert job.process.wait(LIMIT_S) == -numbers[-1]
        assert "Traceback" not in job.err()


def test_a_later_signal_ends_ranks_that_save() -> None:
    with ranks_of("spawn", "save") as job:
        job.process.send_signal(TERM)
        job.wait_for("SAVING", 2)
        goes_on(job)
        job.process.send_signal(TERM)
        assert job.process.wait(LIMIT_S) == -TERM


def test_a_rank_that_dies_takes_no_time_from_one_that_saves() -> None:
    with ranks_of("spawn", "dies_alone") as job:
        job.process.send_signal(TERM)
        goes_on(job)
        (job.folder / "go").touch()
        assert job.process.wait(LIMIT_S) == -TERM
        assert [(job.folder / f"saved{rank}").exists() for rank in (0, 1)] == [True, False]


def test_a_handler_of_the_programs_own_is_called_and_ranks_know_nothing() -> None:
    with ranks_of("spawn", "has_handler") as job:
        job.process.send_signal(TERM)  # its handler lets them go on
        assert job.process.wait(LIMIT_S) == 0, job.err()
        assert "RESULT [0, 1] True" in job.out()
