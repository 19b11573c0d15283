"""What an all_reduce_ through the facade costs over mpi4py's own Allreduce, in two ranks.

Both sum in place over memory of their own and take turns in the same processes. mpi4py's is called
as cheaply as it can be: on a NumPy array over the tensor's memory, with its MPI type given.

    python benchmarks/mpi_calls.py [--rounds 301] [--json]
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from functools import partial

import torch
from harness import Figure, Goal, Timing, interleave, parser, report

import unisono

SMALL_CALLS, LARGE_CALLS = 50, 3
LARGE = 4 * 2**20  # float32: 16 MB
MOST_US = 5.0
MOST_SHARE = 0.03
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


def main() -> int:
    """Measure and print."""
    arguments = parser("What an all_reduce_ costs over mpi4py's own.", 301).parse_args()
    rounds: int = arguments.rounds
    figures = []
    for work, elements, calls in (("4 bytes", 1, SMALL_CALLS), ("16 MB", LARGE, LARGE_CALLS)):
        found = unisono.spawn("mpi4py", sums, (rounds, elements, calls), nproc_per_node=2)[0]
        most = MOST_US if elements == 1 else MOST_SHARE * found["mpi4py"].median
        goal = Goal(most, is_difference=True, bound=BOUND)
        line = f"all_reduce_({work}), world 2"
        figures.append(Figure(line, found["unisono"], "mpi4py", found["mpi4py"], goal))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "mpi4py")}
    facts = {**versions, "rounds": rounds}
    return report("MPI", figures, [BOUND], facts, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
