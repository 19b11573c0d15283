"""What a job says: once, or by whom."""

from __future__ import annotations

import builtins
import io
import logging
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sized
from typing import Any, TextIO, TypeVar

from typing_extensions import TypedDict, Unpack

from unisono._context import current_model
from unisono.launchers._output import tells_rank
from unisono.topology import PREFIXED

__all__ = ("RankFilter", "RankFormatter", "print", "progress")

T = TypeVar("T")
_BAR = 30
_EVERY_S = 0.1


class _PrintOptions(TypedDict, total=False):
    sep: str | None
    end: str | None
    file: TextIO | None
    flush: bool


def print(*args: Any, all: bool = False, **kwargs: Unpack[_PrintOptions]) -> None:
    """Print once on each node, or on every rank, saying which.

    Local.

    Args:
        args: as the built-in's.
        all: whether every rank prints; else the one with local rank 0 does.
        kwargs: ``sep``, ``end``, ``file`` and ``flush``, as the built-in's. With several replicas
            each line begins with ``[rank N]``, unless a pool or ``unisono run`` puts the rank
            there, and leaves in one write.

    Example:
        >>> import unisono as idist
        >>> idist.print("loss", 0.5, sep=": ")
        loss: 0.5
    """
    given: dict[str, Any] = {**kwargs}
    topology = current_model().topology
    local_rank = topology.rank if topology.local_rank is None else topology.local_rank
    if not all and local_rank != 0:
        return
    file = given.pop("file", None)
    flush = given.pop("flush", False)
    text = io.StringIO()
    builtins.print(*args, file=text, **given)
    out: TextIO | None = sys.stdout if file is None else file
    if out is None:
        return
    is_passed_on = out in (sys.stdout, sys.stderr) and os.environ.get(PREFIXED)
    is_marked = tells_rank(out) or is_passed_on == str(topology.rank)
    mark = f"[rank {topology.rank}] " if topology.world_size > 1 and not is_marked else ""
    out.write(mark + text.getvalue())
    if flush:
        out.flush()


class RankFilter(logging.Filter):
    """Lets records of some ranks pass, and gives all a ``rank`` and a ``world_size``.

    Local.

    Args:
        ranks: global ranks that may log; None for all.
        level: records of at least this level pass on every rank.
    """

    def __init__(
        self, ranks: Collection[int] | None = (0,), level: int = logging.CRITICAL + 1
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record passes. Local."""
        topology = current_model().topology
        record.rank, record.world_size = topology.rank, topology.world_size
        is_chosen = self._ranks is None or topology.rank in self._ranks
        return is_chosen or record.levelno >= self._level


class RankFormatter(logging.Formatter):
    """A formatter that knows ``%(rank)s``, ``%(world_size)s`` and ``%(local_rank)s``.

    Local.

    Args:
        fmt: as ``logging.Formatter``'s; None begins with ``[rank N/M]``.
        datefmt: as ``logging.Formatter``'s.
    """

    def __init__(self, fmt: str | None = None, datefmt: str | None = None) -> None:
        line = "[rank %(rank)s/%(world_size)s] %(asctime)s %(name)s %(levelname)s: %(message)s"
        super().__init__(line if fmt is None else fmt, datefmt)

    def format(self, record: logging.LogRecord) -> str:
        """Give a record's line. Local."""
        topology = current_model().topology
        record.rank, record.world_size = topology.rank, topology.world_size
        record.local_rank = topology.local_rank
        return super().format(record)


def progress(
    iterable: Iterable[T], total: int | None = None, label: str = "", file: TextIO | None = None
) -> Iterator[T]:
    """Iterate, and show on rank 0 how far it is: one bar for the job.

    Local.

    Args:
        iterable: anything.
        total: number of its items; None asks its length.
        label: what stands before the bar.
        file: where it is shown, stderr by default: a bar on a terminal, else a line each tenth.

    Yields:
        The items.

    Example:
        >>> import io, unisono as idist
        >>> sum(idist.progress([1, 2, 3], file=io.StringIO()))
        6
    """
    if current_model().topology.rank != 0:
        yield from iterable
        return
    if total is None:
        total = len(iterable) if isinstance(iterable, Sized) else None
    bar = _Bar(total, label, sys.stderr if file is None else file)
    for item in iterable:
        yield item
        bar.advance()
    bar.end()


class _Bar:
    """What is shown of a loop."""

    def __init__(self, total: int | None, label: str, file: TextIO) -> None:
        self._total = total
        self._label = f"{label}: " if label else ""
        self._file = file
        self._is_terminal = file.isatty()
        self._count = 0
        self._begin = time.monotonic()
        self._shown = 0.0
        self._tenth = 0

    def advance(self) -> None:
        """Count an item. Local."""
        self._count += 1
        if self._is_terminal:
            now = time.monotonic()
            if now - self._shown >= _EVERY_S:
                self._shown = now
                self._file.write("\r" + self._line())
                self._file.flush()
        elif self._total and self._count * 10 // self._total > self._tenth:
            self._tenth = self._count * 10 // self._total
            self._file.write(self._line() + "\n")

    def end(self) -> None:
        """Show the last state. Local."""
        if self._is_terminal:
            self._file.write("\r" + self._line() + "\n")
        elif not self._total:
            self._file.write(self._line() + "\n")
        self._file.flush()

    def _line(self) -> str:
        spent = max(time.monotonic() - self._begin, 1e-9)
        rate = f"{self._count / spent:.1f}/s"
        if not self._total:
            return f"{self._label}{self._count} {rate}"
        filled = min(_BAR, _BAR * self._count // self._total)
        bar = "#" * filled + "-" * (_BAR - filled)
        return f"{self._label}[{bar}] {self._count}/{self._total} {rate}"
