"""What ranks tell each other of their calls: few bytes, from which the same is worked out."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.support.records import call, recorded
from unisono.observe.clocks import Moment
from unisono.observe.packing import pack, unpack
from unisono.observe.waits import waits
from unisono.recording import CollectiveRecord

NOW = Moment("a", 10**18, 5)
MOST_BYTES = 8  # of a call: as ranks are late by chance, there is no less in them


def job(size: int, count: int) -> dict[int, list[CollectiveRecord]]:
    """Records of steps of three calls, one of them in a group of two."""
    draw = random.Random(0)
    found: dict[int, list[CollectiveRecord]] = {rank: [] for rank in range(size)}
    begin_ms = 1e9
    for step in range(1, count + 1):
        kinds: list[tuple[int, int, dict[str, Any]]] = [
            (2 * step - 1, size, {"line": 7, "size_bytes": 4096}),
            (2 * step, size, {"line": 9, "name": "broadcast", "size_bytes": 4 * (step % 3)}),
            (step, 2, {"line": 12, "group": "a pair", "name": "barrier", "size_bytes": 0}),
        ]
        for number, several, others in kinds:
            came = [begin_ms + draw.expovariate(1) for _ in range(several)]
            for each in call(number, *came, **others):
                known = each._replace(world_size=size, thread_id=0, job="", dtype="", plane="")
                more = draw.randrange(1000)
                found[each.rank].append(known._replace(duration_ns=each.duration_ns + more))
            begin_ms = max(came) + draw.expovariate(1 / 20)
    return found


def told(records: dict[int, list[CollectiveRecord]]) -> list[bytes]:
    return [pack(NOW, each) for each in records.values()]


def test_what_is_packed_is_unpacked() -> None:
    records = job(3, 50)
    odd = recorded(0, 7, -3, 0.5, ranks=(0, 2), file='é "x"', world_size=3, size_bytes=2**40)
    again = recorded(0, 1, 2, -1e-6, ranks=(0, 1, 2), world_size=3)  # counted from one again
    started = again._replace(number=2, duration_ns=9, overlap_ns=7)
    records[0] += [
        each._replace(thread_id=0, job="", dtype="", plane="") for each in (odd, again, started)
    ]
    for rank, data in enumerate(told(records)):
        assert unpack(rank, 3, data) == (NOW, records[rank])
    assert unpack(0, 3, pack(NOW, [])) == (NOW, [])


def test_the_same_is_worked_out_of_it() -> None:
    records = job(4, 200)
    found = {rank: unpack(rank, 4, data)[1] for rank, data in enumerate(told(records))}
    assert waits(found) == waits(records)
    assert waits(found).calls == 600
    assert any(waits(found).lost_s)


def test_a_call_takes_few_bytes() -> None:
    records = job(2, 4000)
    for data, of_rank in zip(told(records), records.values(), strict=True):
        assert len(data) < MOST_BYTES * len(of_rank)
        rows = [(0, r.number, r.size_bytes, r.arrival_ns, r.duration_ns) for r in of_rank]
        assert len(data) < len(json.dumps(rows)) / 6


def test_a_thousand_ranks_are_not_listed() -> None:
    record = recorded(0, 1, 5, 5)
    few, many = ([record._replace(world_size=n, ranks=range(n))] for n in (2, 1000))
    assert len(pack(NOW, many)) <= len(pack(NOW, few)) + 8
    assert len(unpack(0, 1000, pack(NOW, many))[1][0].ranks) == 1000
