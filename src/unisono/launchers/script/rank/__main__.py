"""Run one rank of a script: ``python FOLDER [options] -- program arguments``.

Whatever launcher made this process, it reads who it is, gives the program torch's variables, marks
each line that the program prints with its rank, keeps a log of them, says how the program failed,
ends it and its children with itself, and ends as it did. It is run by its folder's path and imports
no torch, so that it starts in some 50 ms and holds little memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path


def _load_package() -> None:
    """Load the package that this file is part of, wherever it lies."""
    folder = Path(__file__).resolve().parents[3]
    spec = importlib.util.spec_from_file_location(
        "unisono", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["unisono"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="unisono-rank")
    parser.add_argument("--exec", type=int, default=0, metavar="SIGNAL")
    parser.add_argument("--parent", type=int, default=0, metavar="PID")
    parser.add_argument("--log-dir")
    parser.add_argument("--token", default="")
    parser.add_argument("--colour", action="store_true")
    parser.add_argument("--grace", type=float, metavar="S")
    parser.add_argument("--terminal", type=int, nargs=2, metavar="FD")
    parser.add_argument("--local-ranks-filter", type=int, nargs="+", default=[], metavar="R")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    return parser.parse_args()


def main() -> None:
    """Do what the command line says, and end as the program does."""
    options = _options()
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    _load_package()
    from unisono.launchers.job.forkserver import die_with

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's "&" ignores it

    if options.exec:  # a launcher, which ends with the process that asked for it
        die_with(options.parent, options.exec)
        os.execvp(program[0], program)
    die_with(options.parent, signal.SIGTERM)
    from unisono.launchers.job.wrapper import end_like
    from unisono.launchers.script.rank.program import OutputOptions, run
    from unisono.topology import GRACE_S

    shown = options.local_ranks_filter
    manner = OutputOptions(options.log_dir, options.token, options.colour, options.terminal, shown)
    end_like(run(program, manner, GRACE_S if options.grace is None else options.grace))


if __name__ == "__main__":
    main()
