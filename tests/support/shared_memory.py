"""Anonymous shared memory of a process, and checks of the collectives that use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

import unisono
from unisono.context import communicator
from unisono.host.collectives import HostCollectives


def shared_bytes() -> int:
    """Return the size of the anonymous shared memory that this process maps and has touched."""
    smaps = Path("/proc/self/smaps").read_text()
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    sizes = [
        re.search(r"^Rss:\s+(\d+) kB", part, re.MULTILINE) for part in parts if "memfd" in part
    ]
    return sum(1024 * int(size[1]) for size in sizes if size)


def host_of() -> HostCollectives:
    """Return the shared-memory collectives of the context's default group."""
    host = communicator().control.host(None)
    assert host is not None
    return host


def mappings() -> int:
    """Count this process's mappings of anonymous shared memory."""
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def assert_collectives_are_right(counts: Sequence[int], dtype: torch.dtype) -> None:
    """Check some collectives of tensors with each of `counts` elements, all with the last one.

    Collective over all ranks.
    """
    rank, size = unisono.get_rank(), unisono.get_world_size()
    last = size - 1
    for count in counts:
        numbers = torch.arange(count, dtype=dtype)
        every = [numbers + other for other in range(size)]
        mine, total = every[rank].clone(), torch.stack(every).sum(0)
        assert torch.equal(unisono.all_reduce(mine), total)
        assert torch.equal(mine, every[rank])
        assert torch.equal(unisono.all_reduce(mine, async_op=True).wait(), total)
        assert torch.equal(unisono.all_reduce_(mine.clone()), total)
        torch.testing.assert_close(unisono.all_reduce(mine, "mean"), total / size)
        assert torch.equal(unisono.all_reduce(mine, "min"), every[0])
        assert torch.equal(unisono.all_reduce(mine, "max"), every[last])
        for src in (0, last):
            given = mine if rank == src else None
            assert torch.equal(unisono.broadcast(given, src=src), every[src])
            assert torch.equal(unisono.broadcast_(mine.clone(), src=src), every[src])
    reduced = unisono.reduce(mine, dst=last)
    assert (reduced is None) == (rank != last)
    assert reduced is None or torch.equal(reduced, total)
    assert torch.equal(unisono.all_gather(mine), torch.cat(every))
    uneven = unisono.all_gather(mine[: count - rank])
    assert torch.equal(uneven, torch.cat([x[: count - r] for r, x in enumerate(every)]))
    rows = torch.stack([mine + 10 * other for other in range(size)])
    expected = torch.stack([each + 10 * rank for each in every])
    assert torch.equal(unisono.all_to_all(rows), expected)
    assert torch.equal(unisono.reduce_scatter(rows).view(-1), expected.sum(0))
    part = unisono.scatter(rows if rank == 0 else None, src=0)
    assert torch.equal(part, every[0] + 10 * rank)
    flags = unisono.all_reduce(torch.arange(count) % (rank + 2) == 0, "and")
    assert flags.dtype is torch.bool
    for other, item in enumerate(unisono.all_gather({"rank": rank, "values": mine.numpy()})):
        assert item["rank"] == other
        assert (item["values"] == every[other].numpy()).all()
