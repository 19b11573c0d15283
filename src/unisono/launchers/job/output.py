"""Output of ranks in whole lines: streams that prefix them, and the pipes of processes."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO

from unisono.errors import LaunchError

_LONGEST_LINE = 64 * 1024  # characters or bytes; longer lines are split
# Splits after each newline, and after each carriage return without one.
_END = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")
_POLL_S = 0.02  # between two checks once all pipes have ended


def begin_lines_with_rank(rank: int) -> None:
    """Set each line of this process's stdout and stderr to begin with ``[rank N]``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # None if the program was started without it
            setattr(sys, name, RankStream(stream, rank))


class ByThread:
    """A text stream that writes to a different stream in certain threads."""

    def __init__(self, stream: TextIO) -> None:
        self.stream: TextIO = stream
        self.streams: dict[int, Any] = {}  # by thread id

    def current(self) -> Any:
        """Return the stream of the calling thread."""
        return self.streams.get(threading.get_ident(), self.stream)

    def write(self, text: str) -> int:
        """Write to the stream of the calling thread."""
        return int(self.current().write(text))

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several lines."""
        self.current().writelines(lines)

    def flush(self) -> None:
        """Flush the stream of the calling thread."""
        self.current().flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class RankStream:
    """A text stream whose lines begin with ``[rank N]`` and are written whole, except long ones."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream = stream
        self._prefix = f"[rank {rank}] "
        self._rest = ""
        self._is_at_start = True

    def write(self, text: str) -> int:
        """Write the whole lines, and keep the rest."""
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._put(whole + newline)
        if len(self._rest) > _LONGEST_LINE:
            self.write("\n")
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several lines."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Write the unfinished line, too."""
        rest, self._rest = self._rest, ""
        self._put(rest)

    def _put(self, text: str) -> None:
        if text:
            # After an unfinished line that `flush` has written, `text` continues that line.
            start = self._prefix if self._is_at_start else ""
            lines = text.removesuffix("\n").replace("\n", f"\n{self._prefix}")
            self._stream.write(start + lines + "\n" * text.endswith("\n"))
            self._is_at_start = text.endswith("\n")
        self._stream.flush()  # at once, so that no other rank's line comes between

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Pipes:
    """The outputs of processes, in whole lines; a carriage return ends one, too."""

    def __init__(self) -> None:
        self.selector: selectors.BaseSelector = selectors.DefaultSelector()
        self.logs: dict[int, IO[bytes]] = {}  # files for copies of stdout (1) and stderr (2)
        self._rests: dict[int, bytes] = {}

    def start(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        cwd: str | None = None,
        stdout: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        """Start a process in a new session, as the caller decides what Ctrl-C means."""
        try:
            process = subprocess.Popen(
                list(arguments),
                env=dict(environ),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(f"can't start {arguments[0]!r}: {error}") from error
        self.add(process)
        return process

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """Read the pipes of a process."""
        for target, pipe in ((1, process.stdout), (2, process.stderr)):
            if pipe is not None:
                self.selector.register(pipe, selectors.EVENT_READ, target)

    @contextlib.contextmanager
    def ends(self) -> Iterator[list[int]]:
        """Yield the ends of two new pipes for a process's stdout and stderr."""
        with contextlib.ExitStack() as held:
            pipes = [os.pipe() for _ in range(2)]
            for target, (reader, writer) in enumerate(pipes, 1):
                held.callback(os.close, writer)
                pipe = open(reader, "rb", buffering=0)  # noqa: SIM115 - to its end
                self.selector.register(pipe, selectors.EVENT_READ, target)
            yield [writer for _, writer in pipes]

    def wake(self, source: Any, read: Callable[[], object]) -> None:
        """Call a function in `read` whenever a source is readable, until it returns True."""
        self.selector.register(source, selectors.EVENT_READ, read)

    @property
    def open(self) -> list[Any]:
        """The pipes that are still open."""
        return [key.fileobj for key in self._keys()]

    def _keys(self) -> list[Any]:
        keys = (self.selector.get_map() or {}).values()
        return [key for key in keys if not callable(key.data)]

    def read(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Wait for output; return pairs of 1 for stdout or 2 for stderr, and a line."""
        if not self.selector.get_map():  # callers wait in a loop for their processes' end, too
            time.sleep(max(0.0, min(timeout_s, _POLL_S)))
            return []
        found = []
        for key, _ in self.selector.select(max(0.0, timeout_s)):
            if callable(key.data):
                if key.data() is True:
                    self.selector.unregister(key.fileobj)
                continue
            chunk = os.read(key.fd, 65536)
            if not chunk:  # the pipe's end, at which `_lines` returns an unfinished line
                self._end(key.fileobj)
            if key.data in self.logs:
                self.logs[key.data].write(chunk)
            found += [(key.data, line) for line in self._lines(key.fd, chunk)]
        return found

    def rests(self) -> list[tuple[int, bytes]]:
        """Return the unfinished lines of pipes that other processes hold open."""
        return [(key.data, line) for key in self._keys() for line in self._lines(key.fd, b"")]

    def close(self) -> None:
        """Close all pipes; a second call does nothing."""
        for pipe in self.open:
            self._end(pipe)
        self.selector.close()

    def _end(self, pipe: Any) -> None:
        self.selector.unregister(pipe)
        pipe.close()

    def _lines(self, fd: int, chunk: bytes) -> list[bytes]:
        """Return the lines that a chunk completes, and keep the rest."""
        text = self._rests.pop(fd, b"") + chunk
        *lines, rest = _END.split(text)
        # An empty chunk is the end of the pipe: nothing completes the rest.
        if chunk and len(rest) <= _LONGEST_LINE:
            self._rests[fd] = rest
        elif rest:
            lines.append(rest)
        return lines


def show(target: int, line: bytes) -> None:
    """Print a line of a rank to stdout (1) or stderr (2) as it is."""
    stream = sys.stdout if target == 1 else sys.stderr
    buffer: IO[bytes] | None = getattr(stream, "buffer", None)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no stream
        if buffer is None:  # replaced by a text stream, as in a notebook
            stream.write(line.decode(errors="replace"))
        else:
            buffer.write(line)
        stream.flush()
