"""How strings, numbers, objects and barriers scale over 2 to 8 ranks of one host, ours and others'.

The works and peers of ``payloads.py``, in turns, with one job for each number of ranks. Where ranks
outnumber cores, what is shown is how well each shares them.

    python benchmarks/scaling.py [--ranks 2 4 8] [--rounds 7] [--json | --markdown]
                                 [--calls 50] [--plot out.png]
    python benchmarks/scaling.py --phases [--ranks 8 16 32 64 128] [--rounds 3]
                                 [--json | --markdown]

The second prints how long set-up takes, phase by phase (`phases.py`).
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import phases
import torch
from harness import parser
from payloads import measure
from ratios import Work, ratio_report

import unisono

NAMES = (
    "all_gather of 20 characters",
    "broadcast of a small dict",
    "all_reduce of a number",
    "metrics dict of 20 scalars",
    "barrier",
    "all_gather of an array of 1 MB",
)
RANKS = (2, 4, 8)
Found = Mapping[int, Sequence[Work]]


def plot(found: Found, path: str) -> None:
    """Draw every work's time over the number of ranks, a line for each library."""
    plots = importlib.import_module("matplotlib.figure")
    columns = 3
    rows = math.ceil(len(NAMES) / columns)
    figure = plots.Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    libraries = {name for works in found.values() for work in works for name in work.timings}
    colours = {name: f"C{i}" for i, name in enumerate(sorted(libraries))}
    lines = {}
    for axes, works in zip(grid.flat, zip(*found.values(), strict=True), strict=False):
        for name in works[0].timings:
            times = [work.timings[name].median for work in works]
            (lines[name],) = axes.plot(list(found), times, "o-", color=colours[name])
        axes.set(title=works[0].name, yscale="log", xlabel="ranks", ylabel="microseconds")
        axes.set_xticks(list(found))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines))
    figure.savefig(path)


def main() -> int:
    """Measure and print."""
    made = parser("How values scale over the ranks of one host.", 7)
    made.add_argument("--ranks", type=int, nargs="+", help="default: 2 4 8, for phases to 128")
    made.add_argument("--phases", action="store_true", help="of set-up, in place of values")
    made.add_argument("--calls", type=int, default=50, help="in a turn; default: %(default)s")
    made.add_argument("--plot", metavar="PNG")
    arguments = made.parse_args()
    if arguments.phases:
        print(phases.report(arguments.ranks or phases.RANKS, arguments.rounds, arguments.how))
        return 0
    args = (arguments.rounds, arguments.calls, NAMES)
    sizes = arguments.ranks or RANKS
    found = {n: unisono.spawn("gloo", measure, args, nproc_per_node=n)[0] for n in sizes}
    if arguments.plot:
        plot(found, arguments.plot)
    works = [
        replace(work, name=f"{work.name}, {n} ranks", goal=None)
        for same in zip(*found.values(), strict=True)
        for n, work in zip(found, same, strict=True)
    ]
    about = {"torch": torch.__version__, "rounds": arguments.rounds}
    return ratio_report("Scaling", works, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
