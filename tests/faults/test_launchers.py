"""The same faults under MPI, Horovod and ``unisono run``: the cause comes first."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from _faults import FAULTS
from _programs import Step, alike, expected, programs, run
from _witness import SOURCES, gone
from hypothesis import HealthCheck, given, settings

import unisono
from _measures import Clock, Table
from _needs import require_backend
from unisono import WorkerPool
from unisono.errors import WorkerFailedError

SIZE = 3
AT_MOST_S = 3.0  # mpirun and horovodrun notice the end of a process in their own time
LIBRARIES = ("mpi4py", "horovod")
WAYS = [
    (backend, fault)
    for backend in LIBRARIES
    for fault in ("raises", "os._exit(3)", 'sys.exit("text")', "SIGKILL", "SIGSEGV")
]


@pytest.mark.parametrize(("backend", "fault"), WAYS)
def test_a_fault_while_others_wait(backend: str, fault: str, clock: Clock, table: Table) -> None:
    require_backend(backend)

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 1:
            clock.strike()
            FAULTS[fault].do()
        unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(backend, fn, nproc_per_node=SIZE)
    seconds = clock.since()
    first = str(caught.value).splitlines()[0]
    assert f"rank 1 of {SIZE}" in first
    table.add(f"spawn on {backend}: {fault} while others wait", seconds, AT_MOST_S, first)


@settings(
    deadline=None, derandomize=True, database=None, max_examples=20,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(program=programs(SIZE))
def check_programs(pool: WorkerPool, program: list[Step]) -> None:
    for rank, results in enumerate(pool.run(run, program)):
        for step, result in zip(program, results, strict=True):
            assert alike(result, expected(step, rank)), f"rank {rank}, {step}: {result!r}"


@pytest.mark.parametrize("backend", LIBRARIES)
def test_random_programs_give_what_plain_python_gives(backend: str) -> None:
    require_backend(backend)
    with WorkerPool(backend, nproc_per_node=SIZE) as pool:
        check_programs(pool)


SCRIPT = """
import os, sys, unisono
sys.path.insert(0, {folder!r})
from _faults import FAULTS
from _measures import Clock

unisono.initialize("gloo")
unisono.barrier()
if unisono.get_rank() == 1:
    Clock({clock!r}).strike()
    FAULTS[{fault!r}].do()
unisono.barrier()
"""


@pytest.fixture
def nobody() -> Iterator[None]:
    """Fail where a script of this test lives on."""
    yield
    mine = [p.pid for p in psutil.process_iter() if str(os.getpid()) in _mark(p)]
    assert not gone(mine, 5)


def _mark(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("UNISONO_FAULTS_OF", ""))
    except psutil.Error:
        return ""


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize("launcher", ["processes", "torchrun", "mpi"])
@pytest.mark.parametrize("fault", ["raises", "os._exit(3)", "SIGKILL"])
def test_a_script_that_fails(
    launcher: str, fault: str, clock: Clock, tmp_path: Path, table: Table
) -> None:
    if launcher == "mpi":
        require_backend("mpi4py")
    script = tmp_path / "script.py"
    folder = str(Path(__file__).parent)
    script.write_text(SCRIPT.format(folder=folder, clock=clock.path, fault=fault))
    words = ["run", "--launcher", launcher, "--nproc-per-node", str(SIZE), str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *words],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": SOURCES, "UNISONO_FAULTS_OF": str(os.getpid())},
    )
    seconds = time.monotonic() - float(Path(clock.path).read_text())
    assert done.returncode != 0
    said = {"raises": "ArithmeticError: mine", "os._exit(3)": "3", "SIGKILL": "SIGKILL"}[fault]
    lines = [line for line in done.stderr.splitlines() if said in line]
    if fault == "raises":
        assert lines, done.stderr
    else:
        lines = [line for line in lines if line.startswith("error: rank 1 of")]
        assert lines, done.stderr
    table.add(f"unisono run, {launcher}: {fault}", seconds, AT_MOST_S, lines[0])
