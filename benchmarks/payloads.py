"""What is no accelerator tensor, against everybody else: strings, numbers, metrics, barriers.

All peers are attached to the same gloo group, in replicas that unisono spawns, and take turns in
every round. A goal says how many times faster than the best of them ours shall be.

    python benchmarks/payloads.py [--nproc-per-node 2] [--rounds 21] [--json] [--plot out.png]
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Timing, interleave, parser, plot_ratios, ratio_report

import unisono

TEXT = "twenty characters ok"
LONG = "x" * 5000
METRICS = {f"metric{i}": i * 0.5 for i in range(20)}
BIG = {"weights": torch.ones(250_000), "epoch": 3}
Calls = dict[str, Callable[[], object]]


def _torch_gather(value: object) -> list[object]:
    out: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def _torch_broadcast(value: object) -> object:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _torch_sum(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def _torch_metrics() -> list[float]:
    tensor = torch.tensor(list(METRICS.values()), dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def works() -> dict[str, tuple[float, Calls]]:
    """Give for each work the goal and a callable for us and for each peer that is installed."""
    mine = unisono
    table: dict[str, tuple[float, Calls]] = {
        "all_gather of 20 characters": (
            20,
            {"unisono": lambda: mine.all_gather(TEXT), "torch": lambda: _torch_gather(TEXT)},
        ),
        "all_gather of a small dict": (
            20,
            {
                "unisono": lambda: mine.all_gather({"a": 1, "b": "x"}),
                "torch": lambda: _torch_gather({"a": 1, "b": "x"}),
            },
        ),
        "broadcast of 20 characters": (
            20,
            {"unisono": lambda: mine.broadcast(TEXT), "torch": lambda: _torch_broadcast(TEXT)},
        ),
        "all_reduce of a number": (
            10,
            {"unisono": lambda: mine.all_reduce(0.5), "torch": lambda: _torch_sum(0.5)},
        ),
        "all_gather of a number": (
            10,
            {"unisono": lambda: mine.all_gather(0.5), "torch": lambda: _torch_gather(0.5)},
        ),
        "metrics dict of 20 scalars": (
            10,
            {"unisono": lambda: mine.all_reduce(METRICS), "torch, by hand": _torch_metrics},
        ),
        "barrier": (10, {"unisono": mine.barrier, "torch": dist.barrier}),
        "all_gather of 5000 characters": (
            10,
            {"unisono": lambda: mine.all_gather(LONG), "torch": lambda: _torch_gather(LONG)},
        ),
        "all_gather of a dict with 1 MB": (
            1.5,
            {"unisono": lambda: mine.all_gather(BIG), "torch": lambda: _torch_gather(BIG)},
        ),
    }
    for name, add in PEERS.items():
        if importlib.util.find_spec(name) is not None:
            for work, call in add(importlib.import_module).items():
                table[work][1][name] = call
    return table


def _ignite(load: Callable[[str], Any]) -> Calls:
    peer = load("ignite.distributed")
    peer.sync()
    return {
        "all_gather of 20 characters": lambda: peer.all_gather(TEXT),
        "broadcast of 20 characters": lambda: peer.broadcast(TEXT, safe_mode=True),
        "all_reduce of a number": lambda: peer.all_reduce(0.5),
        "all_gather of a number": lambda: peer.all_gather(0.5),
        "metrics dict of 20 scalars": lambda: {k: peer.all_reduce(v) for k, v in METRICS.items()},
        "barrier": peer.barrier,
        "all_gather of 5000 characters": lambda: peer.all_gather(LONG),
    }


def _mmengine(load: Callable[[str], Any]) -> Calls:
    peer = load("mmengine.dist")
    tensors = {key: torch.tensor(value) for key, value in METRICS.items()}
    return {
        "all_gather of 20 characters": lambda: peer.all_gather_object(TEXT),
        "all_gather of a small dict": lambda: peer.all_gather_object({"a": 1, "b": "x"}),
        "broadcast of 20 characters": lambda: peer.broadcast_object_list([TEXT]),
        "metrics dict of 20 scalars": lambda: peer.all_reduce_dict(dict(tensors)),
        "barrier": peer.barrier,
        "all_gather of 5000 characters": lambda: peer.all_gather_object(LONG),
        "all_gather of a dict with 1 MB": lambda: peer.all_gather_object(BIG),
    }


def _accelerate(load: Callable[[str], Any]) -> Calls:
    load("accelerate").PartialState(cpu=True)
    peer = load("accelerate.utils")
    tensors = {key: torch.tensor(value) for key, value in METRICS.items()}
    return {
        "all_gather of 20 characters": lambda: peer.gather_object([TEXT]),
        "all_gather of a small dict": lambda: peer.gather_object([{"a": 1, "b": "x"}]),
        "broadcast of 20 characters": lambda: peer.broadcast_object_list([TEXT]),
        "all_reduce of a number": lambda: peer.reduce(torch.tensor(0.5), "sum"),
        "metrics dict of 20 scalars": lambda: peer.reduce(tensors, "sum"),
        "barrier": peer.wait_for_everyone,
        "all_gather of 5000 characters": lambda: peer.gather_object([LONG]),
        "all_gather of a dict with 1 MB": lambda: peer.gather_object([BIG]),
    }


def _fabric(load: Callable[[str], Any]) -> Calls:
    fabric = load("lightning_fabric").Fabric(accelerator="cpu", devices=1, num_nodes=1)
    strategy = load("lightning_fabric.strategies").DDPStrategy(
        accelerator=fabric.accelerator, parallel_devices=[torch.device("cpu")]
    )
    return {
        "broadcast of 20 characters": lambda: strategy.broadcast(TEXT),
        "all_reduce of a number": lambda: strategy.all_reduce(torch.tensor(0.5), reduce_op="sum"),
        "barrier": strategy.barrier,
    }


PEERS: dict[str, Callable[[Callable[[str], Any]], Calls]] = {
    "ignite": _ignite,
    "mmengine": _mmengine,
    "accelerate": _accelerate,
    "lightning_fabric": _fabric,
}


def measure(local_rank: int, rounds: int) -> dict[str, tuple[float, dict[str, Timing]]]:
    """Time every work. Collective over all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = works()
        return {
            work: (goal, interleave(rounds, calls, 50)) for work, (goal, calls) in table.items()
        }


def main() -> int:
    """Measure and print."""
    made = parser("What is no accelerator tensor, against everybody else.", 21)
    made.add_argument("--nproc-per-node", type=int, default=2)
    made.add_argument("--plot", metavar="PNG")
    arguments = made.parse_args()
    found = unisono.spawn(
        "gloo", measure, (arguments.rounds,), nproc_per_node=arguments.nproc_per_node
    )[0]
    if arguments.plot:
        plot_ratios(found, arguments.plot)
    about = {"torch": torch.__version__, "ranks": arguments.nproc_per_node}
    return ratio_report("Payloads", found, about, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
