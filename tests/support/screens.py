"""``unisono top`` in a real terminal, and a picture of it.

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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.text import Text

from tests.support.command import SOURCES, wait_until

__all__ = ("Screen", "picture", "top_in_terminal")

_HOME = "\x1b[H"
_LIMIT_S = 120.0
_READ_BYTES = 1 << 16
COLUMNS, LINES = 130, 16


class Screen:
    """A terminal that a command runs in.

    Args:
        process: the command.
        leader: our end of the terminal.
    """

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process, self.leader = process, leader
        self.written = ""

    def read(self, timeout_s: float) -> bool:
        """Read what has been written; tell whether the terminal is still in use."""
        ready, _, _ = select.select([self.leader], [], [], timeout_s)
        try:
            self.written += os.read(self.leader, _READ_BYTES).decode() if ready else ""
        except OSError:  # the command has closed its end
            return False
        return True

    def frame(self) -> list[Text]:
        """Give the lines of the last whole frame, with their colours."""
        frames = self.written.replace("\r\n", "\n").split(_HOME)
        return list(AnsiDecoder().decode(frames[-2].rstrip())) if len(frames) > 2 else []

    def text(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self.frame())

    def wait_for(self, *words: str, hidden: str = "\0") -> str:
        """Read until a frame has all words, and hasn't the one that is hidden."""
        until = time.monotonic() + _LIMIT_S
        while hidden in self.text() or not all(word in self.text() for word in words):
            assert time.monotonic() < until, self.text()
            assert self.read(1.0), self.written[-2000:]
        return self.text()

    def press(self, keys: str) -> None:
        os.write(self.leader, keys.encode())

    def rest(self) -> str:
        """Read until the command has ended."""
        while self.read(1.0):
            pass
        return self.written


@contextmanager
def top_in_terminal(*words: str, **environ: str) -> Iterator[Screen]:
    """Run it in a terminal of its own."""
    leader, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    variables = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "CI")}
    variables |= {"TERM": "xterm-256color", "PYTHONPATH": str(SOURCES), **environ}
    command = [sys.executable, "-m", "unisono", "top", *words]
    with subprocess.Popen(command, env=variables, stdin=end, stdout=end, stderr=end) as process:
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
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder, "pages")
        pages.mkdir(mode=0o700)
        environ = {"UNISONO_STATUS": str(pages), "PYTHONPATH": str(SOURCES)}
        Path(folder, "train.py").write_text(PROGRAM)
        os.mkfifo(Path(folder, "batch.json"))
        job = subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, env={**os.environ, **environ}
        )
        try:
            assert wait_until(lambda: len(list(pages.iterdir())) == 4, _LIMIT_S)
            with top_in_terminal("--every", "0.5", **environ) as screen:
                screen.wait_for("culprit: rank 1", "rank 1 is idle")
                Path(path).write_text(picture(screen.frame()))
        finally:
            job.terminate()
            job.wait()


if __name__ == "__main__":
    _main(sys.argv[1])
