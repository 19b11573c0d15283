"""What calls through the facade cost over mpi4py's own, in two ranks.

A sum of a tensor, and values: a string gathered, a dict broadcast, a number summed. Both sum
tensors in place over memory of their own and take turns in the same processes. mpi4py's sum is
called as cheaply as it can be: on a NumPy array over the tensor's memory, with its MPI type given.

    python benchmarks/mpi_calls.py [--rounds 301] [--json | --markdown]
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

BOUND = "Around MPI's call it makes the facade's checks, finds the live context and writes the "
BOUND += "tensor's address and type for MPI; nothing of that grows with the tensor."


def sums(local_rank: int, rounds: int, elements: int, calls: int) -> dict[str, Timing]:
    """Time the sum of a tensor in place. Collective over all ranks."""
    mpi = importlib.import_module("mpi4py.MPI")
    torch.set_num_threads(1)
    tensor, other = torch.zeros(elements), torch.zeros(elements)
    raw = [other.numpy(), mpi.FLOAT]
    callables: dict[str, Callable[[], object]] = {
        "unisono": partial(unisono.all_reduce_, tensor),
        "mpi4py": partial(mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE, raw),
    }
    return interleave(rounds, callables, calls)


def values(local_rank: int, rounds: int) -> list[dict[str, Timing]]:
    """Time values that aren't tensors. Collective over all ranks."""
    world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    theirs = (
        partial(world.allgather, TEXT),
        partial(world.bcast, SMALL, root=0),
        partial(world.allreduce, 0.5),
    )
    return measure_values(rounds, "mpi4py", theirs)


if __name__ == "__main__":
    sys.exit(compare("mpi4py", sums, values, BOUND, 301))
