"""What ``%%ranks`` costs: the first cell of a kernel, and each of the next ones.

Timed around the magic, in a kernel that nbclient runs; calls of ``WorkerPool.run`` beside it.

    python benchmarks/notebook.py [--nproc-per-node 2] [--backend gloo] [--rounds 50] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import nbclient
import nbformat

FIRST_S, NEXT_S = 2.0, 0.010
LOAD = "%load_ext unisono"
TIMED = """
import time
shell, times = get_ipython(), []
for cell in range({rounds} + 1):
    begin = time.perf_counter()
    shell.run_cell_magic("ranks", "{size} --on {backend}", "x = rank")
    times.append(time.perf_counter() - begin)
import unisono
with unisono.WorkerPool("{backend}", nproc_per_node={size}) as pool:
    pool.run(int)
    for call in range({rounds}):
        begin = time.perf_counter()
        pool.run(int)
        times.append(time.perf_counter() - begin)
import json
print(json.dumps(times))
"""


def measure(size: int, backend: str, rounds: int) -> list[float]:
    """Time cells in a fresh kernel: the first one, the next ones, calls of a pool."""
    timed = TIMED.format(size=size, backend=backend, rounds=rounds)
    cells = [nbformat.v4.new_code_cell(source) for source in (LOAD, timed)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs: list[Any] = notebook.cells[-1].outputs
    times: list[float] = json.loads("".join(output.text for output in outputs))
    return times


def main() -> int:
    """Print the figures; the exit code says whether they are within the goals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds
    first, *rest = measure(options.nproc_per_node, options.backend, rounds)
    cell, call = statistics.median(rest[:rounds]), statistics.median(rest[rounds:])
    if options.json:
        print(json.dumps({"first_s": first, "next_s": cell, "pool_run_s": call}))
    else:
        print(f"%%ranks {options.nproc_per_node} --on {options.backend}, in a kernel")
        print(f"the first cell, ranks included   {first:8.3f} s   <= {FIRST_S:.0f} s")
        print(f"each of the next ones, median    {cell * 1000:8.3f} ms  <= {NEXT_S * 1000:.0f} ms")
        print(f"WorkerPool.run beside it         {call * 1000:8.3f} ms")
    return 0 if first <= FIRST_S and cell <= NEXT_S else 1


if __name__ == "__main__":
    sys.exit(main())
