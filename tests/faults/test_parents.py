"""However the parent ends, with replicas in whatever state, all are gone within two seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.measures import Table
from tests.support.processes import SOURCES, Pipe, gone
from tests.support.requirements import require_backend
from tests.support.ways import Way

AT_MOST_S = 2.0
SHOWN = ["pid", "ppid", "status", "cmdline"]
# Each replica writes its id into a pipe once it is where it will stay.
STATES = """
import ctypes, os, signal, subprocess, sys, unisono

def here():
    with open(sys.argv[1], "wb", buffering=0) as pipe:
        pipe.write(b"%d\\n" % os.getpid())

def compute():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass

states = [compute, lambda: os.kill(os.getpid(), signal.SIGSTOP), unisono.barrier,
          lambda: ctypes.PyDLL(None).sleep(600)]

def stay(local_rank):
    subprocess.Popen(["sh", "-c", "sleep 600; true"])
    unisono.barrier()
    here()
    states[local_rank]()
"""
JOB = """
runner, backend, size = sys.argv[2:]
if runner == "spawn":
    unisono.spawn(backend, stay, nproc_per_node=int(size), grace=0.1)
else:
    with unisono.WorkerPool(backend, int(size), grace=0.1) as pool:
        pool.run(stay)
"""
SCRIPT = """
unisono.initialize("gloo")
stay(unisono.get_rank())
"""
ENDS: dict[str, tuple[int, Callable[[int, int], None]]] = {
    "SIGKILL": (signal.SIGKILL, os.kill),
    "SIGTERM": (signal.SIGTERM, os.kill),
    "Ctrl-C, parent alone": (signal.SIGINT, os.kill),
    "Ctrl-C, whole group": (signal.SIGINT, os.killpg),
}
KILL, TERMINATE, _, CTRL_C_GROUP = ENDS
BACKENDS = ("mpi4py", "horovod")
WAYS = [
    *[(Way("spawn"), end) for end in ENDS],
    *[
        (way, end)
        for way in (Way("WorkerPool"), *(Way("spawn", each) for each in BACKENDS))
        for end in (KILL, CTRL_C_GROUP)
    ],
]
# A rank that doesn't end by itself is given 2.5 s; torchrun's agent looks for its own end, too.
RUN_S = {"processes": 3.0, "torchrun": 4.0, "mpi": 3.0}
# Horovod's helpers, of which nobody is the parent then, give a stuck rank 5 s, twice.
LATER_S = {("horovod", KILL): 11.0}
RUNS = [
    ("processes", TERMINATE),
    *[(launcher, end) for launcher in RUN_S for end in (KILL, CTRL_C_GROUP)],
]


def seconds_to_the_end_of_all(
    words: list[str], size: int, end: str, folder: Path
) -> tuple[float, int, str]:
    """Start a parent, end it once its replicas are stuck; give its code and words, too."""
    number, send = ENDS[end]
    with (
        Pipe(folder) as pipe,
        subprocess.Popen(
            [sys.executable, *(pipe.path if word == "PIPE" else word for word in words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCES},
            start_new_session=True,
        ) as parent,
    ):
        replicas = [int(line) for line in pipe.read(size)]
        everybody = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
        assert set(replicas) < set(everybody)
        start = time.monotonic()
        send(parent.pid, number)
        left = gone(everybody, 20)
        seconds = time.monotonic() - start
        assert not left, [str(psutil.Process(pid).as_dict(SHOWN)) for pid in left]
        _, text = parent.communicate(timeout=20)
    return seconds, parent.returncode, text


@pytest.mark.parametrize(("way", "end"), WAYS, ids=str)
def test_nobody_outlives_the_parent(way: Way, end: str, tmp_path: Path, table: Table) -> None:
    require_backend(way.backend)
    number, _ = ENDS[end]
    size = 4 if way.backend == "gloo" else 2  # the two that hear nothing; interpreters cost more
    words = ["-c", STATES + JOB, "PIPE", way.runner, way.backend, str(size)]
    seconds, code, text = seconds_to_the_end_of_all(words, size, end, tmp_path)
    assert code == -number
    assert "Traceback" not in text, text
    said = "KeyboardInterrupt" if number == signal.SIGINT else "(the parent is gone)"
    assert number != signal.SIGINT or said in text
    limit_s = LATER_S.get((way.backend, end), AT_MOST_S)
    table.add(f"{way}: parent ends by {end}, ranks stuck", seconds, limit_s, said)


@pytest.mark.parametrize(("launcher", "end"), RUNS)
def test_nobody_outlives_unisono_run(launcher: str, end: str, tmp_path: Path, table: Table) -> None:
    if launcher == "mpi":
        require_backend("mpi4py")
    script = tmp_path / "script.py"
    script.write_text(STATES + SCRIPT)
    run = [
        "-m",
        "unisono",
        "run",
        "--launcher",
        launcher,
        "--nproc-per-node",
        "2",
        "--grace",
        "0.1",
    ]
    seconds, code, text = seconds_to_the_end_of_all([*run, str(script), "PIPE"], 2, end, tmp_path)
    number, _ = ENDS[end]
    said = "(the parent is gone)"
    if number == signal.SIGINT:
        said = text.strip().splitlines()[-1]
        assert code == 128 + number
        assert "interrupted" in said
    table.add(
        f"unisono run, {launcher}: ends by {end}, ranks stuck", seconds, RUN_S[launcher], said
    )
