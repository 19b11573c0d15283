"""Run one rank of a script: ``python FOLDER {options as JSON} program arguments``.

Under any launcher, this wrapper detects its rank, sets torch's variables for the program, prefixes
each of the program's lines with the rank, logs the lines, and reports the program's failure. The
program and its children end with the wrapper, which exits as the program did. It is run by its
folder's path and imports no torch, so that it starts in some 50 ms and holds little memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the program of the command line, and exit as it does."""
    options, program = json.loads(sys.argv[1]), sys.argv[2:]
    # This file is run by its path, so the package may be missing from sys.path.
    folder = Path(__file__).resolve().parents[3]
    spec: Any = importlib.util.spec_from_file_location(
        "unisono", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = sys.modules["unisono"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    parent = options.pop("parent", 0)
    from unisono.launchers.job.forkserver import end_with

    if "exec" in options:  # a launcher, which ends with the process that requested it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's "&" ignores it
        end_with(parent, options["exec"])
        os.execvp(program[0], program)
    from unisono.launchers.script.rank.program import run_rank

    # As stdin, since torch's agent passes on no other descriptor: see `Supervisor.start_agent`.
    server = socket.socket(fileno=0) if options.pop("has_server", False) else None
    run_rank(parent, program, options, server=server)


if __name__ == "__main__":
    main()
