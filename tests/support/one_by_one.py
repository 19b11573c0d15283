"""Run programs one after the other in this process, or in each rank of it, all as `__main__`.

    LAUNCHER one_by_one.py FOLDER PROGRAMS

This file is a script that imports only the standard library, as a program may need nothing else.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

BEGINS = "=== "


def main() -> None:
    folder, programs = sys.argv[1], json.loads(sys.argv[2])
    # The output of this process and its children goes into a file that no other rank writes.
    file = os.open(f"{folder}/{os.getpid()}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, sys.stdout.fileno())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _separate_stores()
    variables = dict(os.environ)
    for name, words in programs.items():
        os.write(file, f"{BEGINS}{name}\n".encode())
        sys.argv[:], sys.path[0] = words, str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")
        sys.stdout.flush()
        _end()
        os.environ.clear()
        os.environ.update(variables)
    os.write(file, f"{BEGINS}the end\n".encode())
    if "unisono" not in sys.modules:
        sys.stderr.flush()
        os._exit(0)  # threads of other libraries may abort a process at its exit


def _separate_stores() -> None:
    """Give each process group an empty part of torchrun's store, which earlier groups have used."""
    distributed: Any = importlib.import_module("torch.distributed")
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    of_agent, numbers = rendezvous._create_c10d_store, itertools.count()

    def create(*args: Any, **options: Any) -> Any:
        return distributed.PrefixStore(f"group {next(numbers)}", of_agent(*args, **options))

    rendezvous._create_c10d_store = create


def _end() -> None:
    """End contexts and groups that a program leaves until its process exits."""
    loaded = sys.modules.get
    if unisono := loaded("unisono"):
        unisono.finalize()
    if state := loaded("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    gc.collect()
    if (torch := loaded("torch.distributed")) and torch.is_initialized():
        torch.destroy_process_group()


if __name__ == "__main__":
    main()
