"""What an exact sum costs over a plain one: `all_reduce` of 1 MB on gloo, in one host's memory.

Both take turns in the same processes. ``near`` numbers are of a few exponents, as one layer's
gradients are; ``far`` ones are spread over 2**-30 to 2**30, so more limbs travel. The numbers
don't change, so each turn does the same.

    python benchmarks/exact.py [--ranks 2 4] [--rounds 15] [--json | --markdown]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from harness import Figure, Timing, interleave, parser, report

import unisono

BYTES = 1 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
SPREADS = {"near": 0, "far": 30}


def measure(local_rank: int, rounds: int) -> dict[str, tuple[Timing, Timing]]:
    """Time an exact sum and a plain one, for each kind of numbers. Collective over all ranks."""
    torch.set_num_threads(1)
    found = {}
    for name, dtype in DTYPES.items():
        for kind, spread in SPREADS.items():
            values = torch.randn(BYTES // dtype.itemsize, dtype=torch.float64)
            exponents = torch.randint(-spread, spread + 1, values.shape)
            value = torch.ldexp(values, exponents).to(dtype)
            calls: dict[str, Callable[[], object]] = {
                "exact": partial(unisono.all_reduce, value, exact=True),
                "plain": partial(unisono.all_reduce, value),
            }
            timings = interleave(rounds, calls, 3)
            found[f"{name}, {kind}"] = (timings["exact"], timings["plain"])
    return found


def in_ms(timing: Timing) -> Timing:
    """Give milliseconds."""
    return Timing(tuple(value / 1000 for value in timing.rounds))


def main() -> int:
    """Measure and print."""
    made = parser("What an exact sum of 1 MB costs over a plain one.", 15)
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    arguments = made.parse_args()
    figures, notes = [], []
    for ranks in arguments.ranks:
        found = unisono.spawn("gloo", measure, (arguments.rounds,), nproc_per_node=ranks)[0]
        for work, (exact, plain) in found.items():
            name = f"exact sum of 1 MB, {work}, world {ranks}"
            figures.append(Figure(name, in_ms(exact), "plain", in_ms(plain), unit="ms"))
            # Round by round, for on a busy machine a slow round is slow for both.
            pairs = zip(exact.rounds, plain.rounds, strict=True)
            ratio = statistics.median(mine / other for mine, other in pairs)
            notes.append(f"{name}: {ratio:.1f} times a plain one, the median of the rounds.")
    about = {"torch": torch.__version__, "rounds": arguments.rounds}
    return report("Exact sums", figures, notes, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
