"""Ranks that make others wait, found by comparing all ranks' calls at the end of a block."""

from __future__ import annotations

import pickle
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from unisono.collectives.gathers import all_gather
from unisono.context import communicator
from unisono.observe.waits import Clock, Watch as Watch, common_clock, waits
from unisono.recording.records import CollectiveRecord, add_hook
from unisono.topology import boot_id

_MOST = 100_000  # calls of a rank that are kept: the last ones
_MOST_OF_ALL = 1_000_000  # calls of all ranks together, which each of them compares
_LEAST = 1_000  # calls of a rank, however many there are


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
    vars(watch).update(vars(_waits(all_gather(_packed(clock, kept)))))


def _packed(clock: Clock, records: Iterable[CollectiveRecord]) -> bytes:
    columns = list(zip(*records, strict=True))  # equal values side by side compress well
    return zlib.compress(pickle.dumps((clock, columns)))


def _waits(packed: Sequence[bytes]) -> Watch:
    clocks, records = {}, {}
    for rank, each in enumerate(packed):
        clocks[rank], columns = pickle.loads(zlib.decompress(each))
        records[rank] = [CollectiveRecord(*row) for row in zip(*columns, strict=True)]
    return waits(records, *common_clock(records, clocks))
