"""What a call through the facade costs over the raw call: facts and the smallest tensor.

Serial and world size 1 are measured in this process, world size 2 in replicas that unisono spawns,
where rank 0 reports. All peers of a line take turns in the same process.

    python benchmarks/dispatch.py [--rounds 301] [--json | --markdown]
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import Figure, Goal, Timing, interleave, parser, report

import unisono

FACT_CALLS = 2000
SUM_CALLS = 50
SERIAL = Goal(
    1.5,
    bound="It looks, under a lock, for a context that somebody else made: one look into "
    "sys.modules for each library that is known, and at torch's group.WORLD.",
)
ATTACHED = Goal(
    0.5,
    bound="It asks the thread's slot, then the process's, and whether that context is still the "
    "live one: torch's group.WORLD, two properties, is half of it.",
)
OVER_RAW = Goal(
    5.0,
    is_difference=True,
    bound="It makes about ten Python calls and checks around the raw one, 1.4 us in a tight loop, "
    "and twice that between collectives, after which the caches are cold.",
)
BOUNDS = [
    f"What bounds get_rank() serial: {SERIAL.bound}",
    f"What bounds get_rank() attached: {ATTACHED.bound}",
    f"What bounds all_reduce_(): {OVER_RAW.bound}",
]

Callables = dict[str, Callable[[], object]]


def ignite() -> Any:
    """Give ignite.distributed, attached to the live context, or None if it isn't installed."""
    if importlib.util.find_spec("ignite") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("ignite.distributed")
        module.sync()
    return module


def facts(rounds: int, peer: Any) -> dict[str, Timing]:
    """Time `get_rank` in the context that is live, or in none."""
    calls: Callables = {"unisono": unisono.get_rank}
    if unisono.is_distributed():
        calls["torch"] = dist.get_rank
    if peer is not None:
        calls["ignite"] = peer.get_rank
    return interleave(rounds, calls, FACT_CALLS)


def sums(rounds: int, peer: Any) -> dict[str, Timing]:
    """Time the sum of one float32, in place. Collective over all ranks."""
    tensor = torch.zeros(1)
    calls: Callables = {
        "unisono": partial(unisono.all_reduce_, tensor),
        "torch": partial(dist.all_reduce, tensor),
    }
    if peer is not None:
        calls["ignite"] = partial(peer.all_reduce, tensor)
    return interleave(rounds, calls, SUM_CALLS)


def both(local_rank: int, rounds: int) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Time both in the context that is live. Collective over all ranks."""
    peer = ignite()
    return facts(rounds, peer), sums(rounds, peer)


def lines(work: str, timings: dict[str, Timing], goal: Goal) -> list[Figure]:
    """Make a line for each peer; the goal stands on the first."""
    ours, *peers = timings
    if not peers:
        return [Figure(work, timings[ours], goal=goal)]
    goals = [goal, *[None] * len(peers)]
    return [
        Figure(work, timings[ours], peer, timings[peer], judged)
        for peer, judged in zip(peers, goals, strict=False)
    ]


def main() -> int:
    """Measure and print."""
    arguments = parser("What a call through the facade costs over the raw call.", 301).parse_args()
    rounds = arguments.rounds
    serial = facts(rounds, ignite())
    unisono.initialize("gloo")
    try:
        alone = both(0, rounds)
    finally:
        unisono.finalize()
    pair = unisono.spawn("gloo", both, (rounds,), nproc_per_node=2)[0]
    figures = lines("get_rank(), serial", serial, SERIAL)
    for size, (ranks, totals) in enumerate((alone, pair), 1):
        figures += lines(f"get_rank(), gloo, world {size}", ranks, ATTACHED)
        figures += lines(f"all_reduce_(4 bytes), gloo, world {size}", totals, OVER_RAW)
    about = {"torch": torch.__version__, "rounds": rounds}
    return report("Dispatch", figures, BOUNDS, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
