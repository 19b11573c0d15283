"""What a process printed last, told by another one where it ends in the midst of a law.

A launcher is checked in the process that asks for it, and what is printed meanwhile goes to a file.
A library may end that process from its own code, as Ray does where its cluster has gone. Then
nobody would be left to show the file. So a witness waits for the end of the process: an interpreter
of its own, which is told each law before it begins.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_SHOWN_LINES = 15
_OUTPUT = "output"


def last_lines(folder: str) -> list[str]:
    """Return what was printed last under a law that has this folder."""
    try:
        text = Path(folder, _OUTPUT).read_text(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()[-_SHOWN_LINES:]
    return ["printed last:", *lines] if lines else []


class Witness:
    """Shows on stderr in which law this process has ended, and what was printed there last."""

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> Witness:
        # Neither Ctrl-C nor what the laws print is for it; its stderr is ours as it is now.
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", __file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.kill()  # a fork that a law has left may hold the pipe open
        self._process.wait()

    def enter(self, law: str, folder: str) -> Path:
        """Say that a law begins; gives the file for what is printed."""
        self._tell({"subject": self._subject, "law": law, "folder": folder})
        return Path(folder, _OUTPUT)

    def leave(self) -> None:
        """Say that no law is under way."""
        self._tell({})

    def _tell(self, news: dict[str, str]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._process.stdin.write(f"{json.dumps(news)}\n".encode())
            self._process.stdin.flush()


def _witness() -> None:
    """Read what is told until the process that tells it has ended, and show what is left."""
    news: dict[str, str] = {}
    for line in sys.stdin:
        news = json.loads(line)
    if news:
        text = f"{news['subject']}: the process that checks it has ended in law {news['law']}"
        words = last_lines(news["folder"]) or ["it had printed nothing"]
        sys.stderr.write("".join(f"{line}\n" for line in [text, *(f"  {word}" for word in words)]))
        shutil.rmtree(news["folder"], ignore_errors=True)


if __name__ == "__main__":
    _witness()
