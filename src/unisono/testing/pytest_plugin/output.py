"""Separate output streams for ranks that are threads."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from unisono.launchers.job.output import ByThread, RankStream

Printed = dict[tuple[int, str], io.StringIO]
_NAME = "unisono-rank-"  # prefix of their threads' names


@contextmanager
def of_threads(is_kept: bool) -> Iterator[Printed]:
    """Separate the output of thread ranks: record it if `is_kept`, else prefix lines."""
    printed: Printed = {}
    kept = printed if is_kept else None
    out: Any = _ByRank(sys.stdout, "stdout", kept)
    err: Any = _ByRank(sys.stderr, "stderr", kept)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield printed
        finally:
            for stream in (*out.streams.values(), *err.streams.values()):
                stream.flush()  # incomplete lines


class _ByRank(ByThread):
    """A text stream with a separate target for each rank."""

    def __init__(self, stream: TextIO, name: str, kept: Printed | None) -> None:
        super().__init__(stream)
        self._name = name
        self._kept = kept

    def own(self) -> Any:
        thread = threading.current_thread().name
        if not thread.startswith(_NAME):
            return self.stream
        rank = int(thread.removeprefix(_NAME))
        if rank in self.streams:
            return self.streams[rank]
        if self._kept is None:
            own: Any = RankStream(self.stream, rank)
        else:
            own = self._kept.setdefault((rank, self._name), io.StringIO())
        return self.streams.setdefault(rank, own)
