"""Random operations on four ranks for long: right, the same on all, and nothing grows."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import os
import random
import time
from collections import deque
from typing import Any

import psutil
import pytest

import unisono
from tests.support.random_programs.on_ranks import begin
from tests.support.random_programs.steps import BASIC, Step
from tests.support.random_programs.values import Filled
from tests.support.shared_memory import mappings, shared_bytes

_log = logging.getLogger(__name__)
SECONDS = float(os.environ.get("UNISONO_SOAK_S", "10"))
RANKS = 4
GROUPS = (None, (0, 1), (1, 2, 3), (0, 3))
MIB = 1 << 20
MOST_SHARED_BYTES = RANKS * 40 * MIB  # of tensors 32 for each rank; mailboxes have the rest
MOST_GROWN_BYTES = 64 * MIB  # of which a first call of each kind takes most
BATCH = 200

DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8")
COUNTS = (0, 5, 100, 5_000, 50_000, 50_000, 500_000)  # on both sides of what is cut in slices
OPS = ("SUM", "MIN", "MAX", "MEAN")


def drawn(turn: int, dice: random.Random) -> Step:
    """Draw the next call, alike on all ranks; most are of tensors."""
    group = dice.choice(GROUPS)
    members = range(RANKS) if group is None else group
    values: list[Any] = [None] * RANKS
    call, op, size = "barrier", "SUM", len(members)
    kind = dice.choice(("tensors", "tensors", "tensors", "numbers", "objects", "barrier"))
    if kind == "numbers":
        call, values = "all_reduce", [{"turn": turn, "rank": rank} for rank in range(RANKS)]
    elif kind == "objects":
        text = "x" * dice.choice((1, 100, 20_000, 150_000))
        call = dice.choice(("all_gather", "broadcast"))
        values = [(turn, text, rank) for rank in range(RANKS)]
    elif kind == "tensors":
        call, dtype = dice.choice([*BASIC][1:]), dice.choice(DTYPES)  # the first is the barrier
        op = dice.choice(OPS[: 4 if "float" in dtype else 3])
        shape = (size * dice.choice(COUNTS),)
        rows = [[x + turn % 7 + rank for x in range(5)] for rank in range(RANKS)]
        values = [Filled(tuple(row), dtype, shape) for row in rows]
        if call == "scatter":
            values = [[value] * size for value in values]
    is_async, is_near = dice.random() < 0.3, op == "MEAN" and "reduce" in call
    root = dice.choice(members)
    return Step(call, tuple(values), root, op, group, is_async=is_async, is_near=is_near)


def sizes_of_this_process() -> tuple[int, int, tuple[int, ...]]:
    """Give its memory that nobody else maps, what it shares, and what it has of all else."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed isn't held
    process, shared = psutil.Process(), shared_bytes()
    counts = (process.num_fds(), process.num_threads(), mappings())
    return process.memory_info().rss - shared, shared, counts


def soak(local_rank: int, seconds: float) -> tuple[int, str, list[Any]]:
    dice, digest, under_way = random.Random(7), hashlib.sha256(), deque[Any]()
    until, sizes, turn = time.monotonic() + seconds, list[Any](), 0
    while True:
        for _ in range(BATCH):
            step = drawn(turn, dice)
            under_way.append((step, begin(step, local_rank)))
            digest.update(repr(step).encode())
            turn += 1
            while len(under_way) > 1 or (under_way and not step.is_async):
                begun, finish = under_way.popleft()
                wrong = finish()
                assert wrong is None, f"turn {turn}, {begun}: {wrong}"
        if turn % (5 * BATCH) == 0 or len(sizes) < 3:
            sizes.append(sizes_of_this_process())
        if unisono.broadcast(time.monotonic() >= until and len(sizes) > 2, 0):
            return turn, digest.hexdigest(), sizes


@pytest.mark.timeout(SECONDS + 300)
def test_four_ranks_for_long() -> None:
    results = unisono.spawn("gloo", soak, (SECONDS,), nproc_per_node=RANKS, timeout=120)
    assert len({turns for turns, _, _ in results}) == 1
    assert len({digest for _, digest, _ in results}) == 1
    for turns, _, measured in results:
        first, last = measured[len(measured) // 3], measured[-1]
        _log.info("%d turns: %s .. %s", turns, first, last)
        assert last[2] == first[2], "descriptors, threads, mappings"
        assert last[0] - first[0] < MOST_GROWN_BYTES, f"{turns} turns: {first} .. {last}"
        assert last[1] <= MOST_SHARED_BYTES
