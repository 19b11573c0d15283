"""Random operations on four ranks for long: no drift, no reordering, equal sums."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import random
import time
from typing import Any

import psutil
import pytest
import torch

import unisono

SECONDS = float(os.environ.get("UNISONO_SOAK_S", "10"))
RANKS = 4
GROUPS = (None, [0, 1], [1, 2, 3], [3, 0])


def one(turn: int, dice: random.Random) -> Any:
    """Run one operation that all ranks choose alike; give what all its members must have alike."""
    rank = unisono.get_rank()
    group = dice.choice(GROUPS)
    members = list(range(RANKS)) if group is None else sorted(group)
    wanted: Any
    total: Any
    root, size = dice.choice(members), dice.choice((1, 100, 20_000, 150_000))
    call = dice.choice(("numbers", "tensor", "objects", "broadcast", "async", "barrier"))
    if call == "numbers":
        total = unisono.all_reduce({"turn": turn, "rank": rank}, group=group)
        wanted = {"turn": turn * len(members), "rank": sum(members)}
        assert rank not in members or total == wanted
    elif call == "tensor":
        total = unisono.all_reduce(torch.full((size,), float(turn % 7 + rank)), group=group)
        wanted = sum(turn % 7 + member for member in members)
        assert rank not in members or bool((total == wanted).all())
    elif call == "objects":
        total = unisono.all_gather((turn, "x" * size, rank), group=group)
        wanted = [(turn, "x" * size, member) for member in members]
        assert rank not in members or total == wanted
    elif call == "broadcast":
        total = unisono.broadcast((turn, root) if rank == root else None, root, group=group)
        assert rank not in members or total == (turn, root)
    elif call == "async":
        handles = [unisono.all_reduce(torch.full((size,), float(i)), async_op=True) for i in (1, 2)]
        total = [handle.wait()[0].item() for handle in handles]
        assert total == [RANKS, 2 * RANKS]
    else:
        total = unisono.barrier(group=group)
    return (call, total) if rank in members and group is None else call


def soak(local_rank: int, seconds: float) -> Any:
    dice, digest = random.Random(7), hashlib.sha256()
    process, until = psutil.Process(), time.monotonic() + seconds
    sizes, turn = [], 0
    while True:
        for _ in range(200):
            found = one(turn, dice)
            digest.update(pickle.dumps(repr(found)))
            turn += 1
        if turn % 1000 == 0:
            gc.collect()
            sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
        if unisono.broadcast(time.monotonic() >= until and len(sizes) > 2, 0):
            return turn, digest.hexdigest(), sizes


@pytest.mark.timeout(SECONDS + 300)
def test_four_ranks_for_long() -> None:
    results = unisono.spawn("gloo", soak, (SECONDS,), nproc_per_node=RANKS, timeout=120)
    turns, sums = {result[0] for result in results}, {result[1] for result in results}
    assert len(turns) == 1
    assert len(sums) == 1
    for _, _, sizes in results:
        first, last = sizes[len(sizes) // 3], sizes[-1]
        assert last[1:] == first[1:]
        assert last[0] - first[0] < 16 << 20, f"{(last[0] - first[0]) >> 20} MiB after {turns}"
