"""What the wrapper of a rank says of its end, whoever else wants it to end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable

from tests.support.processes import gone
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import RANK
from unisono.launchers.script.supervisor import held_back, verdict

INFO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
INFO |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
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


def wrapper(program: str, *options: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    words = [sys.executable, RANK, "--token", "t", *options, "--", sys.executable, "-c", program]
    return subprocess.Popen(
        words, env={**os.environ, **INFO}, stdout=subprocess.PIPE, stderr=stderr
    )


def reports(lines: Iterable[bytes]) -> list[Report]:
    reader = Reader("t")
    return [said for line in lines if isinstance(said := reader.read(line), Report)]


def test_a_rank_that_had_ended_was_not_told_to() -> None:
    with wrapper(LEAVES_A_CHILD, "--plain") as process:
        assert process.stdout is not None
        assert gone([int(process.stdout.readline())], 10) == []
        process.send_signal(signal.SIGTERM)  # another rank has failed, because of this one
        _, err = process.communicate()
    (report,) = reports(err.splitlines(True))
    assert (report.code, report.is_secondary) == (-signal.SIGKILL, False)
    assert "short of memory" in report.output
    assert process.returncode == -signal.SIGKILL


def test_a_rank_that_was_told_to_end_did_not_fail_by_itself() -> None:
    with wrapper(HANDLES) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"[0] READY\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == -signal.SIGTERM
    (report,) = reports(err.splitlines(True))
    assert report.was_told
    assert report.is_secondary
    assert "ValueError" in "".join(held_back(verdict([report])))


def test_a_report_is_written_in_pieces_that_a_pipe_takes_whole() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    with ours, wrapper(SAYS_MUCH, "--plain", stderr=theirs.fileno()):
        theirs.close()
        writes = list(iter(lambda: ours.recv(1 << 20), b""))
    lines = [data for data in writes if data.startswith(b"\x1e")]
    assert max(map(len, lines)) <= select.PIPE_BUF
    (report,) = reports(lines)
    assert len(report.output) > 40_000
