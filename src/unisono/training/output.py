"""Rank-aware printing and logging."""

from __future__ import annotations

import builtins
import io
import logging
import os
import sys
from collections.abc import Collection
from typing import Any, TextIO

from typing_extensions import TypedDict, Unpack

from unisono.context import current_model
from unisono.launchers.job.output import RankStream
from unisono.topology import PREFIXED


class _PrintOptions(TypedDict, total=False):
    sep: str | None
    end: str | None
    file: TextIO | None
    flush: bool


def print(*args: Any, all: bool = False, **kwargs: Unpack[_PrintOptions]) -> None:
    """Print once on each node, or on every rank with its number.

    Args:
        args: as the built-in's.
        all: whether every rank prints; else the one with local rank 0 does.
        kwargs: ``sep``, ``end``, ``file`` and ``flush``, as the built-in's. With several replicas
            the text begins with ``[rank N]``, unless a pool or ``unisono run`` adds the rank to
            each line, and is written in one call.

    Example:
        >>> import unisono as idist
        >>> idist.print("loss", 0.5, sep=": ")
        loss: 0.5
    """
    options: dict[str, Any] = {**kwargs}
    topology = current_model().topology
    local_rank = topology.rank if topology.local_rank is None else topology.local_rank
    if not all and local_rank != 0:
        return
    file = options.pop("file", None)
    flush = options.pop("flush", False)
    text = io.StringIO()
    builtins.print(*args, file=text, **options)
    out: TextIO | None = sys.stdout if file is None else file
    if out is None:  # there is no console; the built-in print ignores that, too
        return
    # A launcher prefixes lines with the rank of its process, of which another rank may be a thread.
    prefixed_rank = os.environ.get(PREFIXED) if out in (sys.stdout, sys.stderr) else None
    is_marked = isinstance(out, RankStream) or prefixed_rank == str(topology.rank)
    mark = f"[rank {topology.rank}] " if topology.world_size > 1 and not is_marked else ""
    out.write(mark + text.getvalue())
    if flush:
        out.flush()


class RankFilter(logging.Filter):
    """Filters records by rank, and sets ``rank`` and ``world_size`` on each.

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
        """Return whether a record passes."""
        topology = current_model().topology
        record.rank, record.world_size = topology.rank, topology.world_size
        is_chosen = self._ranks is None or topology.rank in self._ranks
        return is_chosen or record.levelno >= self._level


class RankFormatter(logging.Formatter):
    """A formatter with the fields ``%(rank)s``, ``%(world_size)s`` and ``%(local_rank)s``.

    Args:
        fmt: as ``logging.Formatter``'s; the default begins with ``[rank N/M]``.
        datefmt: as ``logging.Formatter``'s.
    """

    def __init__(self, fmt: str | None = None, datefmt: str | None = None) -> None:
        line = "[rank %(rank)s/%(world_size)s] %(asctime)s %(name)s %(levelname)s: %(message)s"
        super().__init__(line if fmt is None else fmt, datefmt)

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        topology = current_model().topology
        record.rank, record.world_size = topology.rank, topology.world_size
        record.local_rank = topology.local_rank
        return super().format(record)
