"""Commands of unisono in this process, and ``unisono top`` in a terminal.

This makes the picture of the docs:

    python -m tests.support.screens docs/_static/top.svg
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TextIO

import pytest
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

from tests.support.command import UNISONO, environ
from tests.support.processes import read_terminal, until
from unisono.cli import main

_HOME = "\x1b[H"
_LIMIT_S = 120.0
_READ_BYTES = 1 << 16
COLUMNS, LINES = 130, 16


@dataclass(frozen=True, slots=True)
class Ended:
    """A command's exit code, and what it wrote."""

    code: int
    out: str
    err: str


def run(*words: str, **streams: TextIO) -> Ended:
    """Run ``unisono WORDS`` in this process, which has loaded torch already."""
    out, err = StringIO(), StringIO()
    with (
        redirect_stdout(streams.get("stdout", out)),
        redirect_stderr(streams.get("stderr", err)),
        pytest.raises(SystemExit) as ended,
    ):
        main(words)
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, out.getvalue(), err.getvalue())


def on_terminal(
    columns: int, *words: str, stream: str = "stdout", **variables: str
) -> tuple[str, Ended]:
    """Run a command with a terminal for one stream; return the text there, and the outcome."""
    kept = [os.dup(fd) for fd in (0, 1)]
    leader, end = _terminal(columns)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as executor:
        for name in ("COLUMNS", "CI", "NO_COLOR"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", **variables}.items():
            patch.setenv(name, value)
        shown = executor.submit(read_terminal, leader)
        for fd in (0, 1):  # the command gets the terminal's width from these
            os.dup2(end, fd)
        try:
            with open(end, "w") as file:
                ended = run(*words, **{stream: file})
        finally:
            for fd, before in enumerate(kept):
                os.dup2(before, fd)
                os.close(before)
    assert ended.code == 0
    return shown.result().decode().replace("\r\n", "\n"), ended


def _terminal(columns: int, lines: int = 50) -> tuple[int, int]:
    leader, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    return leader, end


class Screen:
    """A terminal that a command runs in.

    Args:
        process: the command.
        leader: the test's end of the terminal.
    """

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process, self.leader = process, leader
        self.written = ""

    def read(self) -> bool:
        """Read what has been written; return whether the terminal is still in use."""
        ready, _, _ = select.select([self.leader], [], [], 0.1)
        try:
            self.written += os.read(self.leader, _READ_BYTES).decode() if ready else ""
        except OSError:  # the command has closed its end
            return False
        return True

    def frame(self) -> list[Text]:
        """Return the lines of the last complete frame, with their colours."""
        frames = self.written.replace("\r\n", "\n").split(_HOME)
        return list(AnsiDecoder().decode(frames[-2].rstrip())) if len(frames) > 2 else []

    def wait_for(self, *words: str, hidden: str = "\0") -> str:
        """Read until a frame has all `words`, and lacks the text `hidden`; return the frame."""

        def is_shown() -> str:
            assert self.read(), self.written[-2000:]
            text = "\n".join(line.plain.rstrip() for line in self.frame())
            return text if hidden not in text and all(word in text for word in words) else ""

        return until(is_shown, _LIMIT_S)

    def press(self, keys: str, *words: str, hidden: str = "\0") -> str:
        """Press keys, and wait until a frame shows `words`."""
        os.write(self.leader, keys.encode())
        return self.wait_for(*words, hidden=hidden) if words else ""

    def rest(self) -> str:
        """Read until the command has ended."""
        while self.read():
            pass
        return self.written


@contextmanager
def top_in_terminal(*words: str, **variables: str) -> Iterator[Screen]:
    """Run ``unisono top`` in a new terminal."""
    leader, end = _terminal(COLUMNS, LINES)
    known = environ("top", **{"TERM": "xterm-256color", **variables})
    env = {name: text for name, text in known.items() if name not in ("COLUMNS", "CI")}
    command = [*UNISONO, "top", *words]
    with subprocess.Popen(command, env=env, stdin=end, stdout=end, stderr=end) as process:
        os.close(end)
        try:
            yield Screen(process, leader)
        finally:
            process.kill()
            os.close(leader)


def picture(frame: list[Text]) -> str:
    """Draw a frame of a terminal as SVG."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for line in frame:
        console.print(line, soft_wrap=True)
    return console.export_svg(title="unisono top", unique_id="top")


PROGRAM = """\
import json
import torch
import unisono as idist

def load(step):
    if step == 3 and idist.get_rank() == 1:
        return json.load(open('batch.json'))
    return torch.ones(1 << 16)

def train(local_rank):
    for step in range(1000):
        idist.all_reduce(load(step))

idist.spawn("gloo", train, nproc_per_node=4)
"""


def _main(path: str) -> None:
    """Make the picture of the docs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pages = folder / "pages"
        pages.mkdir(mode=0o700)
        (folder / "train.py").write_text(PROGRAM)
        os.mkfifo(folder / "batch.json")
        variables = {"UNISONO_STATUS": str(pages)}
        command = [sys.executable, "train.py"]
        with subprocess.Popen(command, cwd=folder, env=environ("train", **variables)) as job:
            try:
                until(lambda: len(list(pages.iterdir())) == 4, _LIMIT_S)
                with top_in_terminal("--every", "0.5", **variables) as screen:
                    screen.wait_for("culprit: rank 1", "rank 1 is idle")
                    Path(path).write_text(picture(screen.frame()))
            finally:
                job.terminate()


if __name__ == "__main__":
    _main(sys.argv[1])
