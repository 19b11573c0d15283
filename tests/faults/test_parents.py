"""However the parent ends, with replicas in whatever state, all are gone within two seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest
from _witness import SOURCES, gone

from _measures import Table

AT_MOST_S = 2.0
# Each replica writes its id into the parent's standard output once it is where it will stay.
JOB = """
import ctypes, os, signal, sys, unisono

def here():
    os.write(1, b"%d\\n" % os.getpid())

def compute():
    while True:
        pass

states = [compute, unisono.barrier, lambda: ctypes.PyDLL(None).sleep(600),
          lambda: os.kill(os.getpid(), signal.SIGSTOP)]

def stay(local_rank):
    unisono.barrier()
    here()
    states[local_rank]()

if sys.argv[1] == "spawn":
    unisono.spawn("gloo", stay, nproc_per_node=4)
else:
    with unisono.WorkerPool("gloo", 4) as pool:
        pool.run(stay)
"""
ENDS: dict[str, tuple[int, Callable[[int, int], None]]] = {
    "SIGKILL": (signal.SIGKILL, os.kill),
    "SIGTERM": (signal.SIGTERM, os.kill),
    "Ctrl-C, parent alone": (signal.SIGINT, os.kill),
    "Ctrl-C, whole group": (signal.SIGINT, os.killpg),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("runner", ["spawn", "WorkerPool"])
def test_nobody_outlives_the_parent(runner: str, end: str, table: Table) -> None:
    number, send = ENDS[end]
    with subprocess.Popen(
        [sys.executable, "-c", JOB, runner],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        replicas = [int(parent.stdout.readline()) for _ in range(4)]
        everybody = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
        assert set(replicas) < set(everybody)
        start = time.monotonic()
        send(parent.pid, number)
        left = gone(everybody, 20)
        seconds = time.monotonic() - start
        assert not left
        _, text = parent.communicate(timeout=20)
    assert parent.returncode == -number
    assert text.count("Traceback") == (number == signal.SIGINT), text
    said = "KeyboardInterrupt" if number == signal.SIGINT else "(the parent is gone)"
    assert number != signal.SIGINT or said in text
    table.add(f"{runner}: parent ends by {end}, ranks stuck", seconds, AT_MOST_S, said)
