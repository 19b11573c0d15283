"""One host of the tests of platforms: ``node.py``, one line of JSON for each job that it is in.

The line has the variables and the name of the node; what its ranks say of themselves is printed.
"""

# ruff: noqa: T201 - what it prints is looked at
from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import unisono


def facts(local_rank: int) -> dict[str, Any]:
    return {
        "rank": unisono.get_rank(),
        "world_size": unisono.get_world_size(),
        "local_rank": local_rank,
        "node_rank": unisono.get_node_rank(),
        "nnodes": unisono.get_nnodes(),
        "hosts": unisono.all_gather(socket.gethostname()),
    }


def main() -> None:
    before, name = dict(os.environ), socket.gethostname()
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.clear()
        os.environ.update({**before, **job["env"]})
        socket.sethostname(job["host"] or name)
        said: object
        try:
            count, nnodes = job["ranks"], job["nnodes"]
            with unisono.Parallel("gloo", nproc_per_node=count, nnodes=nnodes) as parallel:
                said = [parallel.run(facts) for _ in range(job["runs"])][-1]
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
