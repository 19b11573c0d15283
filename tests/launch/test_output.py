"""What `unisono run` shows of a job that fails, hangs, is interrupted, or asks its user."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
import uuid
from pathlib import Path

import psutil
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
print("comm", open("/proc/self/comm").read().strip(), flush=True)
unisono.barrier()
"""
LIMIT_S = 120.0


def words(tmp_path: Path, program: str, *options: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(HEAD + program)
    return [*UNISONO, "run", "--nproc-per-node", "3", *options, str(script)]


def test_a_failure_is_said_once_and_first_who_and_where(tmp_path: Path) -> None:
    done = run(words(tmp_path, FAILS))
    assert done.code == 1
    first, second, empty, head, *_ = done.err.splitlines()
    assert first == (
        "error: rank 1 of 3 raised ValueError: invalid literal for int() with base 10: 'oops'"
    )
    assert re.fullmatch(
        r"  at \S*train\.py:7, in <module> "
        r"\(local rank 1, host \S+, process \d+, exit code 1\)",
        second,
    )
    assert (empty, head) == ("", "Traceback (most recent call last):")
    assert done.err.count("Traceback") == 1
    assert "[rank" not in done.err


def test_who_never_came_is_named_first(tmp_path: Path) -> None:
    done = run(words(tmp_path, HANGS))
    first = done.err.splitlines()[0]
    assert re.fullmatch(
        r"error: rank 2 never came to barrier: it is at \S*train\.py:8 \(signal\.sigtimed.*\)",
        first,
    )
    assert done.err.count("Traceback") == 1
    assert len(re.findall(r"\.\.\. \d+ frames of unisono", done.err)) == 1
    assert "[rank" not in done.err


def test_all_frames_are_shown_on_demand(tmp_path: Path) -> None:
    done = run(words(tmp_path, HANGS), UNISONO_TRACEBACK="full")
    assert "frames of unisono" not in done.err
    assert "hub.py" in done.err


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    with started(words(tmp_path, RUNS)) as job:
        job.wait_for("READY", 3)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(LIMIT_S) == 130
        assert job.err() == "interrupted by SIGINT: all ranks have been ended\n"


def test_ctrl_c_shows_what_had_failed_before(tmp_path: Path) -> None:
    with started(words(tmp_path, FAILS_AND_STAYS)) as job:
        job.wait_for("READY", 3)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(LIMIT_S) == 130
        said = job.err()
    assert "ValueError: invalid literal for int() with base 10: 'oops'\n" in said
    assert said.endswith("\ninterrupted by SIGINT: all ranks have been ended\n")


def test_a_traceback_of_a_program_that_goes_on_is_passed_on(tmp_path: Path) -> None:
    done = run(words(tmp_path, GOES_ON))
    assert done.code == 0, done.err
    for rank in range(3):
        assert f"[{rank}] ERROR:root:goes on\n" in done.err
        assert f"[{rank}] unisono.errors.ArgumentError: src=9" in done.err
        assert f"[{rank}] said\n" in done.out
    assert done.err.count("frames of unisono, UNISONO_TRACEBACK=full shows them") == 3


def test_a_breakpoint_without_a_terminal_says_what_to_do(tmp_path: Path) -> None:
    done = run(words(tmp_path, ASKS))
    assert done.code == 1
    says = r"^the standard input of a rank is empty: unisono run --stdin (\d) gives rank \1 this"
    assert re.search(says, done.err, re.MULTILINE)


def test_one_rank_has_the_terminal(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command, variables = words(tmp_path, ASKS, "--stdin", "1"), environ(mark)
    pid, fd = pty.fork()
    if pid == 0:
        try:
            os.execve(command[0], command, variables)
        finally:
            os._exit(127)
    try:
        screen, answers = talk(fd, [(b"(Pdb) ", b"p value * 7\n"), (b"42\r\n", b"c\n")])
    finally:
        os.close(fd)
        code = code_of(pid)
        nobody_is_left(mark)
    assert code == 0, screen.decode()
    assert not answers
    assert b"\ncomm rank 1 of 3\r\n" in screen


def talk(fd: int, answers: list[tuple[bytes, bytes]]) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Answer what a program on a terminal asks; gives what it printed, and what it didn't ask."""
    screen, until = b"", time.monotonic() + LIMIT_S
    while select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
        try:
            screen += os.read(fd, 4096)
        except OSError:  # how a pty says that nobody has the other end
            break
        if answers and answers[0][0] in screen:
            os.write(fd, answers.pop(0)[1])
    return screen, answers


def code_of(pid: int) -> int:
    """Wait for a child to end; end it where it doesn't."""
    child = psutil.Process(pid)
    try:
        return int(child.wait(LIMIT_S))
    except psutil.TimeoutExpired:
        child.kill()
        child.wait()
        raise


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stdin", "3"], "--stdin 3 should be a rank below 3"),
        (["--stdin", "0", "--launcher", "torchrun"], "launcher 'torchrun' takes no --stdin"),
    ],
)
def test_a_terminal_that_nobody_can_have_is_refused(
    options: list[str], says: str, tmp_path: Path
) -> None:
    done = run(words(tmp_path, ASKS, *options))
    assert done.code == 2
    assert says in done.err
