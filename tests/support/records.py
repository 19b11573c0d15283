"""Records as ranks would make them, from times in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.recording.records import CollectiveRecord
from unisono.recording.status_page import RING_MASK, STEP, WORD, Lane, pack_record
from unisono.topology import EVERYBODY

MS = 1_000_000


def begin_in(lane: Lane, text: bytes, number: int, size: int, begin_ns: int, state: int = 0) -> int:
    """Write a record to a page, as `CallLog.begin` does; return its stamp."""
    stamp = lane.last = lane.last + STEP
    offset = (lane.first + (stamp & RING_MASK)) * WORD
    pack_record(lane.memory, offset, stamp, begin_ns, 0, number, size, text, stamp | state)
    return stamp


def recorded(
    rank: int,
    number: int,
    arrival_ms: float,
    duration_ms: float,
    *,
    ranks: Sequence[int] = (0, 1),
    **others: Any,
) -> CollectiveRecord:
    """Return one rank's record of one call."""
    facts: dict[str, Any] = {
        "name": "all_reduce",
        "world_size": len(ranks),
        "job": "job",
        "group": EVERYBODY,
        "size_bytes": 4,
        "dtype": "float32",
        "plane": "memory",
        "file": "train.py",
        "line": 7,
        "thread_id": 100 + rank,
    }
    times = {"arrival_ns": round(arrival_ms * MS), "duration_ns": round(duration_ms * MS)}
    return CollectiveRecord(
        **{**facts, "rank": rank, "ranks": tuple(ranks), "number": number, **times, **others}
    )


def call(number: int, *arrivals_ms: float, **others: Any) -> list[CollectiveRecord]:
    """Return the records of a call that ends a millisecond after the last rank's arrival."""
    end_ms = max(arrivals_ms) + 1
    ranks = range(len(arrivals_ms))
    return [
        recorded(rank, number, came, end_ms - came, ranks=ranks, **others)
        for rank, came in enumerate(arrivals_ms)
    ]


def steps(*late_ms: Sequence[float], work_ms: float = 20) -> dict[int, list[CollectiveRecord]]:
    """Return records of steps: all ranks compute for the same time, then each is `late_ms` late."""
    records: dict[int, list[CollectiveRecord]] = {rank: [] for rank in range(len(late_ms[0]))}
    begin_ms = 0.0
    for number, late in enumerate(late_ms, 1):
        for each in call(number, *(begin_ms + work_ms + more for more in late)):
            records[each.rank].append(each)
        begin_ms += work_ms + max(late) + 1
    return records
