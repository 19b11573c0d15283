"""What an all_reduce_ through the facade costs over mpi4py's own Allreduce, in two ranks.

Both sum in place over memory of their own and take turns in the same processes. mpi4py's is called
as cheaply as it can be: on a NumPy array over the tensor's memory, with its MPI type given.

    python benchmarks/mpi_calls.py [--rounds 301] [--json]
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial

import torch
from harness import Timing, interleave
from raw_calls import compare

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


if __name__ == "__main__":
    sys.exit(compare("mpi4py", sums, BOUND, 301))
