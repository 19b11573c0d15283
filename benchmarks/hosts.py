"""How fast CPU tensors are summed between two hosts of several ranks, over flat gloo.

The hosts are network namespaces on one bridge of this machine, which root alone can make; `ip`,
`nsenter` and `unshare` must be there. All ranks share this machine's cores and memory, and no wire
bounds them: on a real network the two levels send less (docs/explain/memory.md).

    python benchmarks/hosts.py [--ranks 2] [--sizes 64 1024 16384 102400] [--rounds 11]
                               [--json | --markdown]
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Timing, Work, interleave, parser, ratio_report

import unisono

KIB = 1024
HOSTS = 2
PORT = "29500"  # of a namespace that nobody else uses
GOALS = {64: 2.0, 1024: 1.5, 16384: 1.3, 102400: 1.5}
"""How many times faster than flat gloo, by KiB."""


def measure(local_rank: int, rounds: int, sizes: Sequence[int]) -> dict[int, Mapping[str, Timing]]:
    """Time every size. Collective over all ranks."""
    torch.set_num_threads(1)
    found: dict[int, Mapping[str, Timing]] = {}
    for kib in sizes:
        tensor, turns = torch.ones(kib * KIB // 4), max(1, min(20, 4096 // kib))
        calls: dict[str, Callable[[], object]] = {
            "unisono": partial(unisono.all_reduce_, tensor),
            "gloo": partial(dist.all_reduce, tensor.clone()),
        }
        found[kib] = interleave(rounds, calls, turns)
    return found


def run_node(arguments: Any) -> None:
    """Run the ranks of one host, and leave what they measured in a file."""
    options = (arguments.rounds, arguments.sizes)
    results = unisono.spawn(
        "gloo",
        measure,
        options,
        nproc_per_node=arguments.ranks,
        nnodes=HOSTS,
        node_rank=arguments.node,
        master_addr=arguments.master,
        master_port=int(PORT),
    )
    Path(arguments.results).write_bytes(pickle.dumps(results[0]))


def run_hosts(arguments: Any) -> dict[int, Mapping[str, Timing]]:
    """Make the hosts, run the benchmark on each, and give what the first measured."""
    sys.path.append(str(Path(__file__).parents[1]))
    virtual_hosts: Any = importlib.import_module("tests.support.virtual_hosts")
    reason = virtual_hosts.why_not()
    if reason is not None:
        sys.exit(f"there can be no two hosts here: {reason}")
    words = [sys.executable, __file__, *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder, virtual_hosts.virtual_hosts(Path(folder)) as made:
        nodes = []
        for node in range(HOSTS):
            file = str(Path(folder) / f"results{node}")
            place = ["--node", str(node), "--master", made.addresses[0], "--results", file]
            environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
            nodes.append(subprocess.Popen(made.on(node, [*words, *place]), env=environ))
        if any(list(map(subprocess.Popen.wait, nodes))):
            sys.exit("a host has failed, as it says above")
        found: dict[int, Mapping[str, Timing]] = pickle.loads(
            (Path(folder) / "results0").read_bytes()
        )
    return found


def main() -> int:
    """Measure and print."""
    made = parser("How fast CPU tensors travel between two hosts, each of several ranks.", 11)
    made.add_argument("--ranks", type=int, default=2, help="on each host")
    made.add_argument("--sizes", type=int, nargs="+", default=[64, 1024, 16384, 102400])
    made.add_argument("--node", type=int, help="which host this is; set by the benchmark itself")
    made.add_argument("--master", help="likewise: address of the first host")
    made.add_argument("--results", help="likewise: where the results go")
    arguments = made.parse_args()
    if arguments.node is not None:
        run_node(arguments)
        return 0
    found = run_hosts(arguments)
    works = [
        Work(
            f"all_reduce {f'{kib} KB' if kib < KIB else f'{kib // KIB} MB'}",
            timings,
            GOALS.get(kib) if arguments.ranks > 1 else None,
            bound="All ranks of both hosts share this machine's cores.",
        )
        for kib, timings in found.items()
    ]
    about = {"torch": torch.__version__, "hosts": HOSTS, "ranks of each": arguments.ranks}
    return ratio_report("Hosts", works, {**about, "rounds": arguments.rounds}, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
