"""What the wrapper of a rank says of its end, whoever else wants it to end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import gone
from unisono.launchers.job.signals import END_S, OTHERS, TO_END, TO_SAVE
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import RANK_WRAPPER

INFO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
INFO |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
LIMIT_S = 60.0
LEAVES_A_CHILD = """
import os, subprocess, sys
subprocess.Popen(["sleep", "30"])
print(os.getpid(), flush=True)
print("the kernel is short of memory", file=sys.stderr)
os.kill(os.getpid(), 9)
"""
SAYS_MUCH = """
import sys
print("x" * 40_000, file=sys.stderr, flush=True)
sys.exit(3)
"""


HANDLES = """
import logging, signal
try:
    int("oops")
except ValueError:
    logging.exception("handled")
print("READY", flush=True)
signal.pause()
"""


def wrapper(
    program: str, *words: str, stderr: int = subprocess.PIPE, **options: Any
) -> subprocess.Popen[bytes]:
    said = json.dumps({"token": "t", **options})
    return subprocess.Popen(
        [sys.executable, RANK_WRAPPER, said, sys.executable, "-c", program, *words],
        env={**os.environ, **INFO}, stdout=subprocess.PIPE, stderr=stderr,
    )  # fmt: skip


def reports(lines: Iterable[bytes]) -> list[Report]:
    reader = Reader("t")
    return [said for line in lines if isinstance(said := reader.read(line), Report)]


def test_a_rank_that_had_ended_was_not_told_to() -> None:
    with wrapper(LEAVES_A_CHILD) as process:
        assert process.stdout is not None
        assert gone([int(said(process))], 10) == []
        process.send_signal(signal.SIGTERM)  # another rank has failed, because of this one
        _, err = process.communicate()
    (report,) = reports(err.splitlines(True))
    assert (report.code, report.is_secondary) == (-signal.SIGKILL, False)
    assert report.words == "the kernel is short of memory\n"
    assert process.returncode == -signal.SIGKILL


def test_a_rank_that_was_told_to_end_did_not_fail_by_itself() -> None:
    with wrapper(HANDLES) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[0] READY\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert reports(err.splitlines(True)) == []
    assert b"[0] ValueError: invalid literal" in err


PRINTS = """
import sys
print("a line")
print("a warning", file=sys.stderr)
int("oops")
"""


@pytest.mark.parametrize(("local_ranks", "is_shown"), [([1], False), ([1, 0], True)])
def test_lines_of_other_ranks_than_those_asked_for_go_to_files_alone(
    local_ranks: list[int], is_shown: bool, tmp_path: Path
) -> None:
    with wrapper(PRINTS, log_dir=str(tmp_path), local_ranks=local_ranks) as process:
        out, err = process.communicate()
    assert out == b"[0] a line\n" * is_shown
    assert err.startswith(b"[0] a warning\n[0] Traceback" if is_shown else b"\x1e")
    assert (tmp_path / "rank0.out").read_bytes() == b"a line\n"
    assert (tmp_path / "rank0.err").read_bytes().startswith(b"a warning\nTraceback")
    (report,) = reports(err.splitlines(True))
    assert report.raised == "ValueError: invalid literal for int() with base 10: 'oops'"
    assert ("Traceback" in report.text()) == (not is_shown)


# It says what it hears, and that its child is alive; it saves until it may go on.
SAVES = """
import os, signal, subprocess, sys, time

def hear(number, _):
    print("HEARD", number, child.poll(), flush=True)
    while number in {to_end} and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    if number in {to_end}:
        sys.exit(0)

for number in {numbers}:
    signal.signal(number, hear)
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # it ends with this program
print("READY", flush=True)
while True:
    time.sleep(0.01)  # not forever: a signal may come just before
"""


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a program that saves until there is `tmp_path / "go"`, and wait until it is there."""
    with ExitStack() as stack:
        for number in (*TO_END, *OTHERS):  # as nohup and a shell's "&" ignore some
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
                stack.callback(signal.signal, number, signal.SIG_IGN)

        def start(**options: Any) -> subprocess.Popen[bytes]:
            to_end, others = [*map(int, TO_END)], [*map(int, OTHERS)]
            text = SAVES.format(to_end=to_end, numbers=to_end + others)
            process = stack.enter_context(wrapper(text, str(tmp_path / "go"), **options))
            stack.callback(process.kill)
            assert said(process) == "READY"
            return process

        yield start


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip().removeprefix("[0] ")


@pytest.mark.parametrize("number", TO_SAVE)
def test_a_program_has_time_to_save(
    saving: Callable[..., subprocess.Popen[bytes]], number: int, tmp_path: Path
) -> None:
    process = saving()
    process.send_signal(number)
    process.send_signal(number)  # of Slurm's or systemd's, who signal all processes of a job
    assert said(process) == f"HEARD {number} None"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2 * END_S)
    (tmp_path / "go").touch()
    assert process.wait(LIMIT_S) == 0


def test_its_time_is_an_option_and_is_over_on_ctrl_c(
    saving: Callable[..., subprocess.Popen[bytes]],
) -> None:
    late, hurried = saving(grace_s=0.5), saving(grace_s=600)
    for process in (late, hurried):
        process.send_signal(signal.SIGTERM)
        assert said(process).startswith("HEARD")
    hurried.send_signal(signal.SIGINT)
    for process, warnings in ((late, 1), (hurried, 0)):
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == -signal.SIGKILL
        assert err.count(b"hasn't ended 0.5 s after SIGTERM and is killed: --grace") == warnings


def test_a_program_gets_every_signal_that_it_may_handle(
    saving: Callable[..., subprocess.Popen[bytes]],
) -> None:
    process = saving()
    for number in OTHERS:
        process.send_signal(number)
        assert said(process) == f"HEARD {int(number)} None"  # its child gets none of them


def test_a_report_is_written_in_pieces_that_a_pipe_takes_whole() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    with ours, wrapper(SAYS_MUCH, stderr=theirs.fileno()):
        theirs.close()
        writes = list(iter(lambda: ours.recv(1 << 20), b""))
    lines = [data for data in writes if data.startswith(b"\x1e")]
    assert max(map(len, lines)) <= select.PIPE_BUF
    (report,) = reports(lines)
    assert len(report.words) > 40_000
