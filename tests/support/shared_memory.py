"""What a process sees of memory without a name, and what its ranks move through it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import unisono

__all__ = ("assert_rows_arrive", "mappings", "shared_bytes")


def shared_bytes() -> int:
    """Give how much memory without a name this process sees, as far as it was written to."""
    smaps = Path("/proc/self/smaps").read_text()
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
    sizes = [
        re.search(r"^Rss:\s+(\d+) kB", part, re.MULTILINE) for part in parts if "memfd" in part
    ]
    return sum(1024 * int(size[1]) for size in sizes if size)


def mappings() -> int:
    """Count the memories without a name that this process sees."""
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def assert_rows_arrive(mine: Tensor, every: Sequence[Tensor]) -> None:
    """Check the collectives that send each rank another row.

    Collective over all ranks.

    Args:
        mine: [n] of this rank, of integers.
        every: that of each rank.
    """
    rank = unisono.get_rank()
    rows = torch.stack([mine + 10 * other for other in range(len(every))])
    expected = torch.stack([each + 10 * rank for each in every])
    assert torch.equal(unisono.all_to_all(rows), expected)
    assert torch.equal(unisono.reduce_scatter(rows).view(-1), expected.sum(0))
    part = unisono.scatter(rows if rank == 0 else None, src=0)
    assert torch.equal(part, every[0] + 10 * rank)
