"""The same faults under MPI, Horovod and ``unisono run``: the cause comes first."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import unisono
from tests.support.measures import Clock, Table, says_little, slack
from tests.support.processes import MARK, Pipe, gone, marked, python, say
from tests.support.random_programs.draws import programs
from tests.support.random_programs.on_ranks import (
    FAILURES as PROGRAM_FAULTS,
    play,
    run_until,
    wrong_with,
)
from tests.support.random_programs.steps import Step
from tests.support.requirements import require_backend
from tests.support.ways import SIZE
from unisono import WorkerPool, context
from unisono.errors import WorkerFailedError

END_S = 10.0  # a failed job is over long before, on an idle host
GONE_S = 1.0
LIBRARIES = ("mpi4py", "horovod")
# A launcher looks after its ranks every 0.2 s, and gives them time to end; mpiexec takes a second.
RUN_S = 3.0


@pytest.mark.parametrize("backend", ["gloo", *LIBRARIES])
@pytest.mark.parametrize("way", ["finalize", "abort"])
def test_leaving_waits_for_no_rank_that_is_stopped(
    backend: str, way: str, tmp_path: Path, table: Table
) -> None:
    """A rank of the job stops itself; the other one leaves, and says how long that took."""
    require_backend(backend)
    took = tmp_path / "took"

    def fn(local_rank: int) -> None:
        pids = unisono.all_gather(os.getpid())
        if local_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while psutil.Process(pids[1]).status() != psutil.STATUS_STOPPED:
            os.sched_yield()
        begin = time.monotonic()
        if way == "abort":
            context.current_model().abort()
        else:
            unisono.finalize()
        took.write_text(str(time.monotonic() - begin))
        raise ArithmeticError("after that")

    said = "rank 0 of 2 raised ArithmeticError"
    if backend == "horovod":  # the job may end before Horovod has: at its timeout and a second
        said += "|rank 1 of 2 was stopped by SIGSTOP"
    start = time.monotonic()
    with pytest.raises(WorkerFailedError, match=said) as caught:
        unisono.spawn(backend, fn, nproc_per_node=2, timeout=3)
    seconds = time.monotonic() - start if caught.value.rank == 1 else float(took.read_text())
    case = f"{way} on {backend}, a rank stopped, timeout 3 s"
    # Horovod 0.28 waits 30 s for such a rank, and may hold the interpreter meanwhile.
    limit_s = 35 if backend == "horovod" else 6
    table.add(case, seconds, limit_s, "(left)")


EXAMPLES = partial(
    settings, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.parametrize("backend", LIBRARIES)
def test_random_programs_give_what_plain_python_gives(backend: str) -> None:
    require_backend(backend)

    @EXAMPLES(max_examples=20)
    @given(programs(SIZE))
    def check(program: list[Step]) -> None:
        for step, *found in zip(program, *pool.run(play, program), strict=True):
            assert wrong_with(step, found) is None, step

    with WorkerPool(backend, nproc_per_node=SIZE) as pool:
        check()


def alone(fn: Callable[[], None], rank: int, url: str) -> Any:
    """Start a rank that nobody but its peers ends: a job of its own, which joins the others."""

    def join(local_rank: int) -> None:
        unisono.finalize()
        unisono.initialize("gloo", rank=rank, world_size=SIZE, init_method=url, timeout=60)
        fn()

    return unisono.spawn("gloo", join, join=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", PROGRAM_FAULTS)
def test_every_rank_names_a_rank_that_fails_anywhere(fault: str, tmp_path: Path) -> None:
    limit_s = END_S * slack()

    @EXAMPLES(max_examples=3)
    @given(programs(SIZE, 4), st.integers(0, 4), st.integers(0, SIZE - 1))
    def check(program: list[Step], at: int, victim: int) -> None:
        url = f"file://{tmp_path}/{uuid.uuid4().hex}"
        start = time.monotonic()
        run = lambda: run_until(0, program, at, victim, fault)  # noqa: E731
        jobs = [alone(run, rank, url) for rank in range(SIZE)]
        said = {}
        for rank in sorted(range(SIZE), key=lambda rank: rank != victim):
            with pytest.raises(WorkerFailedError) as caught:
                jobs[rank].join(60)
            said[rank] = str(caught.value)
        assert time.monotonic() - start < limit_s
        assert PROGRAM_FAULTS[fault].says in said.pop(victim)
        for rank, text in said.items():
            assert f"rank {victim}" in text.splitlines()[0], (rank, text)

    check()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_job_ends_with_a_rank_that_fails_anywhere(backend: str, tmp_path: Path) -> None:
    """Its launcher ends the others: all are gone with the error, which names the first."""
    require_backend(backend)
    path, times = str(tmp_path / "pipe"), slack()

    @EXAMPLES(max_examples=3)
    @given(
        programs(SIZE, 4), st.integers(0, 4), st.integers(0, SIZE - 1),
        st.sampled_from(list(PROGRAM_FAULTS)),
    )  # fmt: skip
    def check(program: list[Step], at: int, victim: int, fault: str) -> None:
        def fn(local_rank: int) -> None:
            say(path, os.getpid())
            unisono.barrier()  # so that all have said it when the first one ends
            run_until(local_rank, program, at, victim, fault)

        start = time.monotonic()
        with pytest.raises(WorkerFailedError) as caught:
            unisono.spawn(backend, fn, nproc_per_node=SIZE, timeout=60)
        assert time.monotonic() - start < times * END_S
        says_little(str(caught.value), caught.value.traceback)
        says = f"rank {victim} of {SIZE} {PROGRAM_FAULTS[fault].says}"
        assert str(caught.value).startswith(says)
        assert gone(map(int, pipe.read(SIZE)), times * GONE_S) == []

    with Pipe(tmp_path) as pipe:
        check()


SCRIPT = """
import os, sys, unisono
sys.path.insert(0, {root!r})
from tests.support.faults import FAULTS
from tests.support.measures import Clock

unisono.initialize("gloo")
unisono.barrier()
if unisono.get_rank() == {victim}:
    Clock({clock!r}).strike()
    FAULTS[{fault!r}].do()
unisono.barrier()
"""


SAID = {
    "raises": ("raised ArithmeticError: mine", "exit code 1)"),
    'sys.exit("text")': ("ended with exit code 1; its last output:", "text"),
    "os._exit(3)": ("ended with exit code 3; it printed nothing", ""),
    "SIGKILL": ("was ended by SIGKILL; it printed nothing", ""),
}
# Ranks report alike by any launcher, of which each loses its own ranks in a way of its own.
RUNS = [
    *[("processes", fault, i % 2) for i, fault in enumerate(SAID)],
    *[(launcher, fault, 1) for launcher in ("torchrun", "mpi") for fault in ("raises", "SIGKILL")],
]


@pytest.mark.parametrize(("launcher", "fault", "victim"), RUNS)
def test_a_script_that_fails(
    launcher: str, fault: str, victim: int, clock: Clock, tmp_path: Path, table: Table
) -> None:
    """What is said last is said of the rank that failed first, with its own last words."""
    if launcher == "mpi":
        require_backend("mpi4py")
    script = tmp_path / "script.py"
    root = str(Path(__file__).parents[2])
    script.write_text(SCRIPT.format(root=root, clock=clock.path, fault=fault, victim=victim))
    words = ["run", "--launcher", launcher, "--nproc-per-node", "2", str(script)]
    mark = uuid.uuid4().hex
    done = python("-m", "unisono", *words, env={**os.environ, MARK: mark})
    seconds = clock.since()
    assert marked(mark, 5) == []
    assert done.returncode != 0
    before, error, last = done.stderr.rpartition(f"error: rank {victim} of 2 ")
    assert error, done.stderr
    assert f"(local rank {victim}, host " in last
    first, _, words_of_rank = last.partition("\n")
    how, cause = SAID[fault]
    assert how in first
    assert words_of_rank.strip().endswith(cause), last
    assert (fault == "raises") == ("] ArithmeticError: mine" in before)
    says_little(last, None)
    table.add(f"unisono run, {launcher}: {fault}", seconds, RUN_S, f"{error}{how}")
