"""What calls through the facade cost over Horovod's own, in two replicas.

A sum of a tensor, and values: a string gathered, a dict broadcast, a number summed. Both sum
tensors in place and take turns in the same processes. Horovod answers at the beat of its own thread
(``HOROVOD_CYCLE_TIME``, 1 ms by default), so its peer's time is that of the beat.

    python benchmarks/horovod_calls.py [--rounds 101] [--json | --markdown]
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial

import torch
from harness import Timing, interleave
from raw_calls import SMALL, TEXT, compare, measure_values

import unisono

BOUND = "Both wait for Horovod's own thread; ours looks for the end every 50 us at first, so that "
BOUND += "it leaves the core to that thread, where Horovod's spins."


def sums(local_rank: int, rounds: int, elements: int, calls: int) -> dict[str, Timing]:
    """Time the sum of a tensor in place. Collective over all ranks."""
    hvd = importlib.import_module("horovod.torch")
    torch.set_num_threads(1)
    tensor = torch.zeros(elements)
    callables: dict[str, Callable[[], object]] = {
        "unisono": partial(unisono.all_reduce_, tensor),
        "horovod": partial(hvd.allreduce_, tensor, name="raw", op=hvd.Sum),
    }
    return interleave(rounds, callables, calls)


def values(local_rank: int, rounds: int) -> list[dict[str, Timing]]:
    """Time values that aren't tensors. Collective over all ranks."""
    hvd = importlib.import_module("horovod.torch")
    torch.set_num_threads(1)

    def total() -> float:
        tensor = torch.tensor(0.5, dtype=torch.float64)
        return float(hvd.allreduce(tensor, name="number", op=hvd.Sum).item())

    theirs = (
        partial(hvd.allgather_object, TEXT, name="text"),
        partial(hvd.broadcast_object, SMALL, root_rank=0, name="dict"),
        total,
    )
    return measure_values(rounds, "horovod", theirs)


if __name__ == "__main__":
    sys.exit(compare("horovod", sums, values, BOUND, 101))
