"""However the parent ends, no replica outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import unisono
from tests.support.measures import slack
from tests.support.processes import SOURCES, gone

# Each process writes its id into the parent's standard output once it is where it will stay.
STUCK = """
import ctypes, os, signal, unisono

def here():
    os.write(1, b"%d\\n" % os.getpid())

def compute(local_rank):
    here()
    while True:
        pass

def wait(local_rank):
    if local_rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    here()
    if local_rank == 0:
        unisono.barrier()
    signal.pause()

def sleep_in_c(local_rank):
    here()
    ctypes.CDLL(None).sleep(600)

def hold_the_gil(local_rank):
    here()
    ctypes.PyDLL(None).sleep(600)

def stop(local_rank):
    here()
    os.kill(os.getpid(), signal.SIGSTOP)
"""
KILLED = """
jobs = [unisono.spawn("gloo", wait, nproc_per_node=2, join=False)]
jobs += [unisono.spawn("gloo", fn, join=False) for fn in (compute, hold_the_gil, stop)]
jobs.append(unisono.spawn("gloo", sleep_in_c, start_method="fork", join=False))
if os.fork() == 0:  # a child of the user's own, which holds all that its parent held
    os.write(1, b"%d\\n" % -os.getpid())
signal.pause()
"""
STARTING = """
job = unisono.spawn("gloo", compute, start_method="{method}", join=False)
signal.pause()
"""
INTERRUPTED = """
def one_of_each(local_rank):
    [wait, hold_the_gil, compute][local_rank](local_rank)

unisono.spawn("gloo", one_of_each, nproc_per_node=3)
"""
# Stops each process that imports torch in order to become a helper or a worker.
SITE = """
import os, signal, sys

class Stop:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch" and "{mark}" in "".join(sys.orig_argv):
            os.write({fd}, b"%d\\n" % os.getpid())
            while True:
                signal.pause()

sys.meta_path.insert(0, Stop)
"""


@contextmanager
def parent_of(program: str, folder: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCES}" if folder else SOURCES},
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def pids(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


def test_no_replica_outlives_a_parent_that_is_killed() -> None:
    limit_s = slack()  # 2 s on an idle host
    with parent_of(KILLED) as parent:
        said = pids(parent, 7)
        parent.kill()
        replicas = [pid for pid in said if pid > 0]
        assert not gone(replicas, limit_s)
        assert len(gone([-pid for pid in said if pid < 0], 0)) == 1


@pytest.mark.parametrize(
    ("method", "mark", "fd"),
    [("forkserver", "unisono_helper", 2), ("spawn", "launchers.job.worker", 1)],
    ids=["the helper", "a worker"],
)
def test_nobody_who_is_still_starting_outlives_a_parent_that_is_killed(
    method: str, mark: str, fd: int, tmp_path: Path
) -> None:
    limit_s = slack()
    (tmp_path / "sitecustomize.py").write_text(SITE.format(mark=mark, fd=fd))
    with parent_of(STARTING.format(method=method), tmp_path) as parent:
        stream = parent.stdout if fd == 1 else parent.stderr
        assert stream is not None
        starting = int(stream.readline())
        parent.kill()
        assert not gone([starting], limit_s)


def test_ctrl_c_ends_everybody() -> None:
    limit_s = slack()
    with parent_of(INTERRUPTED) as parent:
        replicas = pids(parent, 3)
        os.killpg(parent.pid, signal.SIGINT)
        assert not gone(replicas, limit_s)
        _, text = parent.communicate(timeout=60)
    assert parent.returncode == -signal.SIGINT
    assert "Traceback" not in text, text
    assert text.count("KeyboardInterrupt") == 1, text


def test_ctrl_c_ends_replicas_that_are_threads() -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        unisono.barrier(group=[1, 2] if local_rank else None)

    with pytest.raises(KeyboardInterrupt):
        unisono.spawn("threads", fn, nproc_per_node=3)
