"""What `unisono run` shows of a job that fails, hangs, is interrupted, or asks its user."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.command import UNISONO, environ, nobody_is_left, run, started

# No rank outlives its test for long, also where pytest was killed.
HEAD = (
    "import logging, os, signal, sys; signal.alarm(300)\n"
    "import unisono\nrank = int(os.environ['RANK'])\n"
)
FAILS = """
unisono.initialize("gloo")
if rank == 1:
    int("oops")
unisono.barrier()
"""
HANGS = """
unisono.initialize("gloo")
unisono.barrier()
if rank == 2:
    signal.sigtimedwait([], 60)
with unisono.deadline(1):
    unisono.barrier()
"""
RUNS = """
print("READY", flush=True)
signal.pause()
"""
FAILS_AND_STAYS = """
import atexit
atexit.register(lambda: (print("READY", flush=True), signal.pause()))
int("oops")
"""
GOES_ON = """
unisono.initialize("gloo")
try:
    unisono.broadcast(1, src=9)
except ValueError:
    logging.exception("goes on")
unisono.print("said", all=True)
unisono.barrier()
"""
ASKS = """
unisono.initialize("gloo")
value = 6
breakpoint()
unisono.barrier()
"""
LIMIT_S = 120.0


def words(tmp_path: Path, program: str, *options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(HEAD + program)
    return [*UNISONO, "run", "--nproc-per-node", "3", *options, str(script)]


def test_the_last_lines_say_who_failed_first_and_where(tmp_path: Path) -> None:
    done = run(words(tmp_path, FAILS))
    assert done.code == 1
    *printed, first, second = done.err.splitlines()
    assert first == (
        "error: rank 1 of 3 raised ValueError: invalid literal for int() with base 10: 'oops'"
    )
    assert re.fullmatch(
        r"  at \S*train\.py:7, in <module> "
        r"\(local rank 1, host \S+, process \d+, exit code 1\)",
        second,
    )
    assert "[1] Traceback (most recent call last):" in printed
    assert all(re.match(r"\[\d\] ", line) for line in printed)
    assert "[rank" not in done.err


@pytest.mark.parametrize("is_full", [False, True])
def test_who_never_came_is_named_first(is_full: bool, tmp_path: Path) -> None:
    """And all frames are shown on demand."""
    done = run(words(tmp_path, HANGS), **({"UNISONO_TRACEBACK": "full"} if is_full else {}))
    says = r"^error: rank 2 never reached barrier: it is at \S*train\.py:8 \(signal\.sigtimed.*\)$"
    assert re.search(says, done.err, re.MULTILINE)
    assert ("hub.py" in done.err) == is_full
    assert "[rank" not in done.err


@pytest.mark.parametrize(
    ("program", "failed"),
    [(RUNS, ""), (FAILS_AND_STAYS, "ValueError: invalid literal for int() with base 10: 'oops'\n")],
)
def test_ctrl_c_is_one_line_after_what_had_failed_before(
    program: str, failed: str, tmp_path: Path
) -> None:
    with started(words(tmp_path, program)) as job:
        job.wait_for("READY", 3)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(LIMIT_S) == 130
        said, _, last = job.err().rpartition("interrupted by SIGINT")
    assert last == ": all ranks have been ended\n"
    assert failed in said
    assert bool(said) == bool(failed)
    assert "KeyboardInterrupt" not in said


def test_a_traceback_of_a_program_that_goes_on_is_passed_on(tmp_path: Path) -> None:
    done = run(words(tmp_path, GOES_ON))
    assert done.code == 0, done.err
    for rank in range(3):
        assert f"[{rank}] ERROR:root:goes on\n" in done.err
        assert f"[{rank}] unisono.errors.ArgumentError: src=9" in done.err
        assert f"[{rank}] said\n" in done.out


def test_a_breakpoint_without_a_terminal_says_what_to_do(tmp_path: Path) -> None:
    done = run(words(tmp_path, ASKS))
    assert done.code == 1
    says = r"^the standard input of a rank is empty: unisono run --stdin (\d) gives rank \1 this"
    assert re.search(says, done.err, re.MULTILINE)


TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def test_one_rank_has_the_terminal(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", TERMINAL, *words(tmp_path, ASKS, "--stdin", "1")]
    typed, env = b"p value * 7\nc\n", environ(mark)
    done = subprocess.run(command, input=typed, capture_output=True, timeout=LIMIT_S, env=env)
    nobody_is_left(mark)
    assert done.returncode == 0, done.stdout.decode()
    assert b"(Pdb) " in done.stdout
    assert b"\n42\r\n" in done.stdout
