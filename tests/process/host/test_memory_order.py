"""Copies of 32 MB are seen whole after the barrier that follows them: a litmus, and its mutant."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.support.by_hand import by_hand, prepare
from unisono.host import memory
from unisono.host.arena import Arena, Layout

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="there is no such memory here")

MIB = 1 << 20
PLAN = Layout(2, 16 * MIB, MIB, False)  # a slot is copied to in one go
COUNT = 8 * MIB  # of float32
TURNS = 12
# Looked at first: what was written last, which a copy past the cache would leave behind.
SPOTS = torch.tensor([COUNT - 1, COUNT - 17, COUNT // 2, 0])


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


@pytest.fixture
def shared() -> Iterator[str]:
    """The path of memory without a name that other processes can map."""
    made = memory.make(PLAN.size_bytes)
    assert made is not None
    yield f"/proc/{os.getpid()}/fd/{made[0]}"
    os.close(made[0])


def wait(position: int) -> None:
    """Look at nothing while the other rank is late."""


def litmus(path: str, late: int, rank: int) -> list[set[float]]:
    """Write and look in turns; `late` elements are written after the stamp that says all are there.

    Returns:
        What was seen in each of this rank's looks.
    """
    torch.set_num_threads(1 + rank)  # a copy is one thread's, or that of several
    with open(path, "r+b") as file:
        arena = Arena(mmap.mmap(file.fileno(), PLAN.size_bytes), rank, PLAN)
    values, seen = torch.empty(COUNT), list[set[float]]()
    for turn in range(TURNS):
        slot = arena.slots(0)[turn & 1].view(torch.float32)
        if rank == turn & 1:
            values.fill_(turn + 1)
            slot[: COUNT - late].copy_(values[: COUNT - late])
            arena.barrier(wait)
            arena.barrier(wait)  # the other rank has looked
            slot[COUNT - late :].copy_(values[COUNT - late :])
        else:
            arena.barrier(wait)
            seen.append({*slot[SPOTS].tolist(), *map(float, slot.aminmax())})
            arena.barrier(wait)
    return seen


def test_large_copies_are_seen_whole(shared: str) -> None:
    seen = by_hand(partial(litmus, shared, 0))
    assert seen[0] == [{float(turn)} for turn in range(2, TURNS + 1, 2)]
    assert seen[1] == [{float(turn)} for turn in range(1, TURNS + 1, 2)]


def test_the_litmus_sees_what_is_written_after_its_stamp(shared: str) -> None:
    for looks in by_hand(partial(litmus, shared, 16)):
        assert all(len(values) > 1 for values in looks), looks
