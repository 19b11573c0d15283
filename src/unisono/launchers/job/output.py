"""What ranks print: each line begins with the rank, and is written whole."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any, TextIO

_LONGEST_LINE = 64 * 1024  # in characters


def begin_lines_with_rank(rank: int) -> None:
    """Let each line of this process's stdout and stderr begin with ``[rank N]``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # as in a program that was started without one
            setattr(sys, name, with_rank(stream, rank))


class ByThread:
    """A text stream that is another one in certain threads."""

    def __init__(self, stream: TextIO) -> None:
        self.stream: TextIO = stream
        """As above."""
        self.streams: dict[int, Any] = {}
        """Streams of threads, by their ids."""

    def own(self) -> Any:
        """Return the stream of the thread that calls this."""
        return self.streams.get(threading.get_ident(), self.stream)

    def write(self, text: str) -> int:
        """Write to the stream of the thread that calls this."""
        return int(self.own().write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """As `write`, for several lines."""
        self.own().writelines(lines)

    def flush(self) -> None:
        """Flush the stream of the thread that calls this."""
        self.own().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def with_rank(stream: TextIO, rank: int) -> Any:
    """Return a stream that writes whole lines to another one, behind ``[rank N]``."""
    return _Prefixed(stream, f"[rank {rank}] ")


def tells_rank(stream: object) -> bool:
    """Return whether lines that are written to a stream begin with the rank."""
    return isinstance(stream, _Prefixed)


class _Prefixed:
    """A text stream whose lines begin with a prefix and are written whole, but for long ones."""

    def __init__(self, stream: TextIO, prefix: str) -> None:
        self._stream = stream
        self._prefix = prefix
        self._held: list[str] = []
        self._n_held = 0
        self._is_at_start = True

    def write(self, text: str) -> int:
        whole, newline, rest = text.rpartition("\n")
        if newline:
            self._put(self._take() + whole + newline)
        self._held.append(rest)
        self._n_held += len(rest)
        if self._n_held > _LONGEST_LINE:
            self._put(self._take() + "\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._put(self._take())

    def _take(self) -> str:
        held, self._held, self._n_held = self._held, [], 0
        return "".join(held)

    def _put(self, text: str) -> None:
        if text:
            start = self._prefix if self._is_at_start else ""
            lines = text.removesuffix("\n").replace("\n", f"\n{self._prefix}")
            self._stream.write(start + lines + "\n" * text.endswith("\n"))
            self._is_at_start = text.endswith("\n")
        self._stream.flush()  # in one piece, so that no other rank's line comes between

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
