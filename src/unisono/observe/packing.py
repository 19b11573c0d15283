"""What a rank tells the others of its calls, in few bytes: names once, figures as differences."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from unisono.observe.clocks import Moment
from unisono.recording import CollectiveRecord

# A line of JSON: the moment, heads (what calls of one line have in common), the number of calls.
# Then columns, compressed: head, number less that of the call before of the group, bytes, arrival
# less that of the call before, duration, overlap. A figure has 8 bytes, the first one of all
# figures of a column first and so on, as most of them are equal then.
_FIGURES = 6
_BYTES = 8
_LEVEL = 6
_Head: TypeAlias = "tuple[str, str, Sequence[int] | None, str, int]"


def pack(moment: Moment, records: Iterable[CollectiveRecord]) -> bytes:
    """Pack records, but for what no other rank asks for: thread, dtype, plane, job, error."""
    heads: dict[_Head, int] = {}
    columns: tuple[list[int], ...] = tuple([] for _ in range(_FIGURES))
    numbers: dict[str, int] = {}
    last_ns = 0
    for each in records:
        are_all = each.ranks == range(each.world_size)  # of which there may be many
        ranks = None if are_all else tuple(each.ranks)
        key = (each.name, each.group, ranks, each.file, each.line)
        figures = (
            heads.setdefault(key, len(heads)),
            each.number - numbers.get(each.group, 0),
            each.size_bytes,
            each.arrival_ns - last_ns,
            each.duration_ns,
            each.overlap_ns,
        )
        numbers[each.group], last_ns = each.number, each.arrival_ns
        for column, figure in zip(columns, figures, strict=True):
            column.append(figure)
    facts = {"moment": (moment.host, moment.wall_ns, moment.monotonic_ns), "heads": list(heads)}
    line = json.dumps({**facts, "calls": len(columns[0])}).encode()
    return line + b"\n" + zlib.compress(b"".join(map(_planes, columns)), _LEVEL)


def unpack(rank: int, world_size: int, data: bytes) -> tuple[Moment, list[CollectiveRecord]]:
    """Return what a rank has packed."""
    line, _, compressed = data.partition(b"\n")
    facts = json.loads(line)
    everybody = tuple(range(world_size))
    heads = [
        (name, group, everybody if ranks is None else tuple(ranks), *at)
        for name, group, ranks, *at in facts["heads"]
    ]
    planes, size = zlib.decompress(compressed), facts["calls"] * _BYTES
    columns = [_figures(planes[at * size :][:size]) for at in range(_FIGURES)]
    columns[3] = accumulate(columns[3])
    return Moment(*facts["moment"]), _records(rank, world_size, heads, columns)


def _records(
    rank: int, world_size: int, heads: Sequence[Any], columns: Sequence[Iterable[int]]
) -> list[CollectiveRecord]:
    found = []
    numbers: dict[str, int] = {}
    for head, more, size, arrival, duration, overlap in zip(*columns, strict=True):
        name, group, ranks, file, line = heads[head]
        number = numbers[group] = numbers.get(group, 0) + more
        found.append(
            CollectiveRecord(
                name, rank, world_size, "", group, ranks, number, size, "", "", file, line, 0,
                arrival, duration, "", overlap,
            )
        )  # fmt: skip
    return found


def _planes(figures: Sequence[int]) -> bytes:
    data = array("q", figures).tobytes()
    return b"".join(data[at::_BYTES] for at in range(_BYTES))


def _figures(planes: bytes) -> Iterable[int]:
    data, count = bytearray(len(planes)), len(planes) // _BYTES
    for at in range(_BYTES):
        data[at::_BYTES] = planes[at * count :][:count]
    return array("q", bytes(data))
