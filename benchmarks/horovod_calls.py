"""What an all_reduce_ through the facade costs over Horovod's own, in two replicas.

Both sum in place and take turns in the same processes. Horovod answers at the beat of its own
thread (``HOROVOD_CYCLE_TIME``, 1 ms by default), so its peer's time is that of the beat.

    python benchmarks/horovod_calls.py [--rounds 101] [--json]
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


def main() -> int:
    """Measure and print."""
    arguments = parser("What an all_reduce_ costs over Horovod's own.", 101).parse_args()
    rounds: int = arguments.rounds
    figures = []
    for work, elements, calls in (("4 bytes", 1, SMALL_CALLS), ("16 MB", LARGE, LARGE_CALLS)):
        found = unisono.spawn("horovod", sums, (rounds, elements, calls), nproc_per_node=2)[0]
        most = MOST_US if elements == 1 else MOST_SHARE * found["horovod"].median
        goal = Goal(most, is_difference=True, bound=BOUND)
        line = f"all_reduce_({work}), world 2"
        figures.append(Figure(line, found["unisono"], "horovod", found["horovod"], goal))
    versions = {name: importlib.metadata.version(name) for name in ("torch", "horovod")}
    facts = {**versions, "rounds": rounds}
    return report("Horovod", figures, [BOUND], facts, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
