"""What the jobs of these tests do: ``job.py MODE [BACKEND]``."""

# ruff: noqa: T201 - what it prints is looked at
from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

import unisono


def facts() -> dict[str, object]:
    return {
        "rank": unisono.get_rank(),
        "world_size": unisono.get_world_size(),
        "local_rank": unisono.get_local_rank(),
        "nproc_per_node": unisono.get_nproc_per_node(),
        "node_rank": unisono.get_node_rank(),
        "nnodes": unisono.get_nnodes(),
        "model": unisono.model_name(),
        "ranks": unisono.all_gather(unisono.get_rank()),
        "job": unisono.all_gather(os.environ.get("UNISONO_TEST_MARK", "")),
    }


def save() -> None:
    """Leave at the same step, and save until the test lets it go on."""
    with unisono.preemptible(signal.SIGUSR1):
        print("READY", os.getpid())
        while not unisono.preemption_point():
            time.sleep(0.01)
        print("SAVING")
        while not Path("go").exists():
            time.sleep(0.01)
        Path(f"saved{unisono.get_rank()}").touch()


def main() -> None:
    mode, backend = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    if mode == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    unisono.initialize(backend)
    is_chosen = unisono.get_rank() == unisono.get_world_size() - 1
    print("FACTS", json.dumps(facts()))
    if mode in ("wait", "stubborn", "stuck"):
        print("READY", os.getpid())
        if mode == "stuck":
            sys.stdout.flush()
            ctypes.PyDLL(None).sleep(600)  # it holds the interpreter
        while True:
            time.sleep(600)
    if mode == "stop" and is_chosen:
        print("READY", os.getpid())
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "save":
        save()
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_chosen and (is_first or not mode.endswith("-once")):
        print("last words to stdout")
        print("last words to stderr", file=sys.stderr)
        if mode.startswith("raise"):
            try:
                raise KeyError("the cause")
            except KeyError as error:
                raise ValueError("the failure") from error
        if mode == "exit":
            sys.exit(7)
        if mode.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
    unisono.barrier()
    unisono.finalize()
    print("DONE")


if __name__ == "__main__":
    main()
