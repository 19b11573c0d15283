"""Ranks that make others wait, found by comparing all ranks' calls at the end of a block."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unisono.collectives.gathers import all_gather
from unisono.context import communicator
from unisono.observe.waits import Clock, Waits, common_clock, draw, waits
from unisono.recording.records import CollectiveRecord, add_hook
from unisono.topology import boot_id
from unisono.tracebacks import hides

__tracebackhide__ = hides

_MOST = 100_000  # calls of a rank that are kept: the last ones
_MOST_OF_ALL = 1_000_000  # calls of all ranks together, which each of them compares
_LEAST = 1_000  # calls of a rank, however many there are
_MOST_LINES = 5  # of a table


class Watch:
    """The result of `watching`, empty until the block is over. The same on every rank."""

    def __init__(self) -> None:
        self._waits = Waits()

    @property
    def slowest(self) -> int | None:
        """The rank that costs the others time; None if none stands out."""
        return self._waits.slowest

    @property
    def lost_s(self) -> tuple[float, ...]:
        """By rank, seconds in which another rank waited for it."""
        return self._waits.lost_s

    @property
    def waited_s(self) -> tuple[float, ...]:
        """By rank, seconds in which it waited for another."""
        return self._waits.waited_s

    @property
    def by_line(self) -> dict[str, float]:
        """Seconds that the others waited, by file and line of the call, the most first."""
        found: dict[str, float] = {}
        for line in self._waits.lines:
            if any(line.lost_s):
                found[line.site] = found.get(line.site, 0.0) + sum(line.lost_s)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def last(self) -> tuple[int, ...]:
        """By rank, how often it arrived last, and late, in the last hundred calls."""
        return self._waits.last

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw by rank the seconds that others waited for it, and that it waited.

        Args:
            path: of the picture; its suffix sets the format, as in ``"waits.png"``.

        Raises:
            ArgumentError: matplotlib isn't installed, or the file can't be written.
        """
        draw("plot()", {"": self._waits}, path)

    def __str__(self) -> str:
        return _table(self._waits)

    def __repr__(self) -> str:
        return f"<Watch: slowest {self.slowest}, lost_s {self.lost_s}>"


@contextmanager
def watching() -> Iterator[Watch]:
    """Find the rank that makes the others wait within the block.

    Collective over all ranks, at the end of the block, where each rank sends the others its
    arrivals at collectives. Late arrivals count, not durations, which are the same on all ranks.
    A block that raises on a rank has no result, and the others report a missing rank as in any
    collective. The last 100,000 calls of each rank are kept; with more than 10 ranks a million in
    all, though at least 1,000 of each. They are sent in some 10 bytes per call.

    Yields:
        A `Watch`, filled in once the block is over.

    Raises:
        CollectiveError: a peer failed or didn't arrive in time.

    Example:
        >>> import unisono as idist
        >>> with idist.watching() as watch:
        ...     for step in range(3):
        ...         loss = idist.all_reduce(0.5)
        >>> print(watch.slowest, watch.lost_s)
        None (0.0,)
    """
    topology = communicator().model.topology
    rank, world_size = topology.rank, topology.world_size
    most = min(_MOST, max(_MOST_OF_ALL // world_size, _LEAST))
    kept: deque[CollectiveRecord] = deque(maxlen=most)

    def keep(record: CollectiveRecord) -> None:
        # Hooks get the calls of all ranks that are threads of this process, and of other contexts.
        if record.rank == rank and record.world_size == world_size:
            kept.append(record)

    watch = Watch()
    remove = add_hook(after=keep)
    try:
        yield watch
    finally:
        remove()  # the exchange below isn't a call of the block
    clock = Clock(boot_id(), time.time_ns() - time.monotonic_ns())
    watch._waits = _waits(all_gather(_packed(clock, kept)))


def _packed(clock: Clock, records: Iterable[CollectiveRecord]) -> bytes:
    columns = list(zip(*records, strict=True))  # equal values side by side compress well
    return zlib.compress(pickle.dumps((clock, columns)))


def _waits(packed: Sequence[bytes]) -> Waits:
    clocks, records = {}, {}
    for rank, each in enumerate(packed):
        clocks[rank], columns = pickle.loads(zlib.decompress(each))
        records[rank] = [CollectiveRecord(*row) for row in zip(*columns, strict=True)]
    return waits(records, *common_clock(records, clocks))


def _table(found: Waits) -> str:
    if not found.lost_s:
        return "nothing is known before the end of the block"
    lines = [found.headline, "rank   others waited for it   arrived last   it waited    in calls"]
    lines += [
        f"{rank:4}{lost:21.3f} s{last:15}{waited:10.3f} s{busy:10.3f} s"
        for rank, (lost, last, waited, busy) in enumerate(
            zip(found.lost_s, found.last, found.waited_s, found.in_calls_s, strict=True)
        )
    ]
    for line in [each for each in found.lines if any(each.lost_s)][:_MOST_LINES]:
        where = f" at {Path(line.site).name}" if line.site else ""
        lost = sum(line.lost_s)
        lines.append(f"{lost:.3f} s for rank {line.slowest} in {line.name}{where}")
    return "\n".join(lines)
