"""What horovodrun prints: lines of its ranks, which it marks, and its own."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from unisono.launchers.job.tail import show_error

_FROM_RANK = re.compile(rb"\[(\d+)\]<(stdout|stderr)>:")
_LINE = re.compile(rb"(?<=[\r\n])")
_SHELL_SAYS = frozenset({"Terminated", "Killed", "Aborted"})


class Lines:
    """Passes on what ranks print without horovodrun's marks, and keeps what horovodrun says."""

    def __init__(self, is_verbose: bool) -> None:
        self.notes: deque[str] = deque(maxlen=40)
        self.is_ending = False
        """Whether ranks are being ended, of which their shells tell."""
        self._is_verbose = is_verbose
        self._last: dict[int, deque[str]] = {}

    def last_of(self, rank: int) -> Iterable[str]:
        """Return the last lines that a rank printed to stderr."""
        return tuple(self._last.get(rank, ()))

    def taker(self) -> Callable[[bytes], None]:
        """Make what takes the pieces of one stream, the last of them empty."""
        rest = b""

        def take(data: bytes) -> None:
            nonlocal rest
            *lines, rest = _LINE.split(rest + data) if data else (rest, b"")
            for line in filter(None, lines):
                self._sort(line)

        return take

    def _sort(self, line: bytes) -> None:
        match = _FROM_RANK.match(line)
        if match is None:
            self.notes.append(line.decode(errors="replace").rstrip())
            if self._is_verbose:
                show_error(line)
            return
        text = line[match.end() :].decode(errors="replace")
        is_error = match[2] == b"stderr"
        if is_error:
            if self.is_ending and text.rstrip() in _SHELL_SAYS:
                return
            self._last.setdefault(int(match[1]), deque(maxlen=20)).append(text.rstrip())
        stream: Any = sys.stderr if is_error else sys.stdout
        with contextlib.suppress(Exception):  # it may be closed, or a user's own
            stream.write(text)
            stream.flush()
