"""What ``import unisono`` costs on top of ``import torch``, and what it doesn't load.

In each round every peer has a fresh interpreter, in turns: one imports torch alone, one torch and
then unisono, one torch and then ignite.distributed where that is installed. The figure is the time
of the second import, taken in the interpreter that has just done the first. The difference between
whole interpreters, with and without unisono, is shown beside it; it says the same and spreads far
more, because torch takes a hundred times as long. Bytecode is compiled first, as installers do it.

    python benchmarks/imports.py [--rounds 15] [--json | --markdown]
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import Figure, Goal, Timing, parser, report

MUST_NOT_LOAD = (
    "horovod",
    "torch_xla",
    "mpi4py",
    "ray",
    "typer",
    "rich",
    "cloudpickle",
    "sklearn",
)
GOAL = Goal(
    15.0,
    bound="It is bound by reading about 60 small modules and by making a dozen dataclasses, 0.6 ms "
    "each; the helpers for training and the sockets of the control plane are a third of it. "
    "`python -X importtime -c 'import unisono'` shows which. On a busy machine look at the time "
    "on the CPU, or run again.",
)
CODE = """
import importlib, json, sys, time
start = time.perf_counter_ns()
import torch
middle, before = time.perf_counter_ns(), set(sys.modules)
cpu = time.process_time_ns()
if sys.argv[1] != "torch":
    importlib.import_module(sys.argv[1])
end = time.perf_counter_ns()
cpu = time.process_time_ns() - cpu
new = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"all": end - start, "second": end - middle, "cpu": cpu, "new": new}))
"""


def copy_compiled(folder: str) -> None:
    """Lay the package of this checkout into `folder`, with its bytecode."""
    source = Path(__file__).resolve().parents[1] / "src" / "unisono"
    shutil.copytree(source, Path(folder, "unisono"), ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder, quiet=1)


def run(module: str, folder: str) -> dict[str, Any]:
    """Import torch, then `module`, in a fresh interpreter."""
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, module],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(rounds: int, modules: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run each module once untimed, then once in every round, in turns."""
    results: dict[str, list[dict[str, Any]]] = {module: [] for module in modules}
    with tempfile.TemporaryDirectory() as folder:
        copy_compiled(folder)
        for module in modules:
            run(module, folder)
        for i in range(rounds):
            first = i % len(modules)
            for module in (*modules[first:], *modules[:first]):
                results[module].append(run(module, folder))
    return results


def column(results: list[dict[str, Any]], key: str) -> Timing:
    """Take one time of every round, in milliseconds."""
    return Timing(tuple(result[key] / 1e6 for result in results))


def main() -> int:
    """Measure and print."""
    arguments = parser("What `import unisono` costs on top of `import torch`.", 15).parse_args()
    has_ignite = importlib.util.find_spec("ignite") is not None
    peer = "ignite.distributed" if has_ignite else ""
    results = measure(arguments.rounds, ["torch", "unisono", *filter(None, [peer])])
    ours = results["unisono"]
    figures = [
        Figure(
            "import unisono, after import torch",
            column(ours, "second"),
            peer,
            column(results[peer], "second") if peer else None,
            goal=GOAL,
            unit="ms",
        ),
        Figure("the same, time on the CPU", column(ours, "cpu"), unit="ms"),
        Figure(
            "import torch, unisono; whole interpreters",
            column(ours, "all"),
            "torch alone",
            column(results["torch"], "all"),
            unit="ms",
        ),
    ]
    loaded = sorted(set(MUST_NOT_LOAD) & {name for result in ours for name in result["new"]})
    notes = [
        f"Must not be loaded: {', '.join(MUST_NOT_LOAD)}. Loaded: {', '.join(loaded) or 'none'}.",
    ]
    code = report("Import", figures, notes, {"rounds": arguments.rounds}, how=arguments.how)
    return max(code, int(bool(loaded)))


if __name__ == "__main__":
    sys.exit(main())
