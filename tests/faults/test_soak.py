"""Random operations on four ranks for long: right, the same on all, and nothing grows."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import os
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import unisono
from tests.support.shared_memory import mappings, shared_bytes

_log = logging.getLogger(__name__)
SECONDS = float(os.environ.get("UNISONO_SOAK_S", "10"))
RANKS = 4
GROUPS = (None, [0, 1], [1, 2, 3], [3, 0])
MIB = 1 << 20
MOST_SHARED_BYTES = RANKS * 40 * MIB  # of tensors 32 for each rank; mailboxes have the rest
MOST_GROWN_BYTES = 64 * MIB  # of which a first call of each kind takes most
BATCH = 200

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
COUNTS = (0, 1, 100, 5_000, 50_000, 50_000, 500_000)  # on both sides of what is cut in slices
FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda rows: rows.sum(0, dtype=rows.dtype),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
    "MEAN": lambda rows: rows.mean(0),
}


def row(turn: int, member: int, count: int, dtype: torch.dtype) -> Tensor:
    """Make what a member gives: whole numbers so small that every dtype adds them exactly."""
    return (torch.arange(count) % 5 + (turn % 7 + member)).to(dtype)


def tensors(turn: int, dice: random.Random, group: list[int] | None, members: list[int]) -> str:
    """Run one collective of tensors, and compare what this rank gets with what all gave."""
    rank, size = unisono.get_rank(), len(members)
    dtype, count = dice.choice(DTYPES), size * dice.choice(COUNTS)
    op = dice.choice([op for op in FOLDS if op != "MEAN" or dtype.is_floating_point])
    root, is_async = dice.choice(members), dice.random() < 0.3
    call = dice.choice(
        ("all_reduce", "all_reduce_", "reduce", "reduce_scatter")
        + ("all_gather", "gather", "broadcast", "broadcast_", "all_to_all", "scatter")
    )
    if rank not in members:
        return call
    given = torch.stack([row(turn, member, count, dtype) for member in members])
    mine, place = given[members.index(rank)].clone(), members.index(rank)
    total, joined = FOLDS[op](given), given.reshape(-1)
    rows = list(given[members.index(root)].view(size, -1)) if rank == root else None
    calls: dict[str, tuple[Callable[..., Any], Tensor | None]] = {
        "all_reduce": (partial(unisono.all_reduce, mine, op), total),
        "all_reduce_": (partial(unisono.all_reduce_, mine, op), total),
        "reduce": (partial(unisono.reduce, mine, root, op), total if rank == root else None),
        "reduce_scatter": (
            partial(unisono.reduce_scatter, mine, op),
            total.view(size, -1)[place],
        ),
        "all_gather": (partial(unisono.all_gather, mine), joined),
        "gather": (partial(unisono.gather, mine, root), joined if rank == root else None),
        "broadcast": (partial(unisono.broadcast, mine, root), given[members.index(root)]),
        "broadcast_": (partial(unisono.broadcast_, mine, root), given[members.index(root)]),
        "all_to_all": (partial(unisono.all_to_all, mine), given.view(size, size, -1)[:, place]),
        "scatter": (
            partial(unisono.scatter, rows, root),
            given[members.index(root)].view(size, -1)[place],
        ),
    }
    start, expected = calls[call]
    result = start(group=group, async_op=True).wait() if is_async else start(group=group)
    is_right = result is None if expected is None else torch.equal(result, expected.reshape(-1))
    assert is_right, f"turn {turn}: {call} {op} of {count} {dtype} from {root}, {is_async=}"
    return call


def one(turn: int, dice: random.Random) -> Any:
    """Run one operation that all ranks choose alike; give what all its members must have alike."""
    rank = unisono.get_rank()
    group = dice.choice(GROUPS)
    members = list(range(RANKS)) if group is None else sorted(group)
    if dice.random() < 0.5:
        return tensors(turn, dice, group, members)
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


@dataclass(frozen=True)
class Sizes:
    """What a process has of each, and what of its memory nobody else maps."""

    own_bytes: int
    shared_bytes: int
    descriptors: int
    threads: int
    mappings: int


def sizes_of_this_process() -> Sizes:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed isn't held
    process = psutil.Process()
    memory = process.memory_info()
    shared = shared_bytes()
    return Sizes(memory.rss - shared, shared, process.num_fds(), process.num_threads(), mappings())


def soak(local_rank: int, seconds: float) -> tuple[int, str, list[tuple[int, ...]]]:
    dice, digest = random.Random(7), hashlib.sha256()
    until, sizes, turn = time.monotonic() + seconds, list[tuple[int, ...]](), 0
    while True:
        for _ in range(BATCH):
            digest.update(pickle.dumps(repr(one(turn, dice))))
            turn += 1
        if turn % (5 * BATCH) == 0 or len(sizes) < 3:
            sizes.append(astuple(sizes_of_this_process()))
        if unisono.broadcast(time.monotonic() >= until and len(sizes) > 2, 0):
            return turn, digest.hexdigest(), sizes


@pytest.mark.timeout(SECONDS + 300)
def test_four_ranks_for_long() -> None:
    results = unisono.spawn("gloo", soak, (SECONDS,), nproc_per_node=RANKS, timeout=120)
    assert len({turns for turns, _, _ in results}) == 1
    assert len({digest for _, digest, _ in results}) == 1
    for turns, _, measured in results:
        first, last = Sizes(*measured[len(measured) // 3]), Sizes(*measured[-1])
        _log.info("%d turns: %s .. %s", turns, first, last)
        counts = ("descriptors", "threads", "mappings")
        assert [getattr(last, name) for name in counts] == [getattr(first, name) for name in counts]
        grown = last.own_bytes - first.own_bytes
        assert grown < MOST_GROWN_BYTES, f"{grown >> 20} MiB after {turns}"
        assert last.shared_bytes <= MOST_SHARED_BYTES
