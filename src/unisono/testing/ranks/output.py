"""What ranks that are threads print, apart from each other."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TextIO

from unisono.launchers.job.output import ByThread, with_rank

Printed = dict[tuple[int, str], io.StringIO]
_NAME = "unisono-rank-"  # of their threads


@contextmanager
def of_threads(is_kept: bool) -> Iterator[Printed]:
    """Keep apart what threads print that are ranks."""
    printed: Printed = {}
    before = sys.stdout, sys.stderr
    own = [
        _ByRank(stream, partial(_kept, printed, name) if is_kept else partial(with_rank, stream))
        for stream, name in zip(before, ("stdout", "stderr"), strict=True)
    ]
    sys.stdout, sys.stderr = own
    try:
        yield printed
    finally:
        for stream in own:
            stream.end()
        if sys.stdout is own[0]:
            sys.stdout = before[0]
        if sys.stderr is own[1]:
            sys.stderr = before[1]


def _kept(printed: Printed, name: str, rank: int) -> io.StringIO:
    return printed.setdefault((rank, name), io.StringIO())


class _ByRank(ByThread):
    """A text stream that has one of its own for each rank."""

    def __init__(self, stream: TextIO, make: Callable[[int], Any]) -> None:
        super().__init__(stream)
        self._make = make

    def own(self) -> Any:
        thread = threading.current_thread().name
        if not thread.startswith(_NAME):
            return self.stream
        rank = int(thread.removeprefix(_NAME))
        if rank not in self.streams:
            self.streams[rank] = self._make(rank)
        return self.streams[rank]

    def end(self) -> None:
        """Let lines through that aren't whole."""
        for stream in self.streams.values():
            stream.flush()
