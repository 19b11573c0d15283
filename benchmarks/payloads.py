"""What isn't an accelerator tensor, against everybody else: strings, numbers, metrics, barriers.

All peers are attached to the same gloo group, in replicas that unisono spawns, and take turns in
every round. A goal says how many times faster than the best of them ours should be; a work without
one is only shown. With two ranks, a socket between them with pickled values stands beside ours too.

    python benchmarks/payloads.py [--nproc-per-node 2] [--rounds 21] [--json | --markdown]
                                  [--calls 50] [--plot out.png]
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import Work, interleave, parser, plot, ratio_report
from rich.console import Console
from rich.progress import Progress

import unisono

TEXT = "twenty characters ok"
LONG = "x" * 5000
SMALL = {"a": 1, "b": "x"}
STATUS = {"loss": 0.5, "seen": 32, "name": "epoch", "is_done": True}
METRICS = {f"metric{i}": i * 0.5 for i in range(20)}
ARRAY = np.ones(125_000)
BIG = {"weights": torch.ones(250_000), "epoch": 3}
Calls = dict[str, Callable[[], object]]

ROUND = (
    "One round through memory that the ranks share: what is left is Python's work around it, and, "
)
ROUND += "with more ranks than cores, the kernel's turns between them."
FLOAT = (
    "The peers' own collective on one float64 is short already; ours is bound as every round is."
)
COPIES = "The copies of a megabyte into and out of shared memory, for every pair of ranks."
SECTION = "Two rounds: the one rank is done, and the others are."
WORKS: dict[str, tuple[float | None, str]] = {
    "all_gather of 20 characters": (20, ROUND),
    "all_gather of a small dict": (20, ROUND),
    "all_gather of a dict of 4 scalars": (20, ROUND),
    "all_gather of a dict of 20 keys": (20, ROUND),
    "broadcast of 20 characters": (20, ROUND),
    "broadcast of a small dict": (20, ROUND),
    "all_reduce of a number": (10, FLOAT),
    "all_gather of a number": (10, ROUND),
    "metrics dict of 20 scalars": (10, FLOAT),
    "barrier": (10, ROUND),
    "all_gather of 5000 characters": (10, ROUND),
    "all_gather of a dict with 1 MB": (1.5, COPIES),
    "all_gather of an array of 1 MB": (1.5, COPIES),
    "one rank first, with nothing to do": (None, SECTION),
}
"""For each work how many times faster ours should be, if there is a goal, and its bound."""
SOCKET = "a bare socket"
PYTHON = "Python's work around the exchange: a socket compares no calls and reports no late rank."
BESIDE_SOCKET = {
    "all_gather of 20 characters": 1.0,
    "all_gather of a small dict": 1.2,
    "all_reduce of a number": 1.0,
    "metrics dict of 20 scalars": 1.2,
    "all_gather of 5000 characters": 1.2,
}
"""For works of two ranks: how many times the time of a bare socket ours may take."""


def _enter(section: Callable[[], AbstractContextManager[object]]) -> None:
    with section():
        pass


def _unisono() -> Calls:
    mine = unisono
    return {
        "all_gather of 20 characters": lambda: mine.all_gather(TEXT),
        "all_gather of a small dict": lambda: mine.all_gather(SMALL),
        "all_gather of a dict of 4 scalars": lambda: mine.all_gather(STATUS),
        "all_gather of a dict of 20 keys": lambda: mine.all_gather(METRICS),
        "broadcast of 20 characters": lambda: mine.broadcast(TEXT),
        "broadcast of a small dict": lambda: mine.broadcast(SMALL),
        "all_reduce of a number": lambda: mine.all_reduce(0.5),
        "all_gather of a number": lambda: mine.all_gather(0.5),
        "metrics dict of 20 scalars": lambda: mine.all_reduce(METRICS),
        "barrier": mine.barrier,
        "all_gather of 5000 characters": lambda: mine.all_gather(LONG),
        "all_gather of a dict with 1 MB": lambda: mine.all_gather(BIG),
        "all_gather of an array of 1 MB": lambda: mine.all_gather(ARRAY),
        "one rank first, with nothing to do": lambda: _enter(mine.one_rank_first),
    }


def _torch() -> Calls:
    def gather(value: object) -> list[object]:
        out: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(out, value)
        return out

    def broadcast(value: object) -> object:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def total(values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def first() -> None:
        if dist.get_rank() != 0:
            dist.barrier()
        if dist.get_rank() == 0:
            dist.barrier()

    return {
        "all_gather of 20 characters": lambda: gather(TEXT),
        "all_gather of a small dict": lambda: gather(SMALL),
        "all_gather of a dict of 4 scalars": lambda: gather(STATUS),
        "all_gather of a dict of 20 keys": lambda: gather(METRICS),
        "broadcast of 20 characters": lambda: broadcast(TEXT),
        "broadcast of a small dict": lambda: broadcast(SMALL),
        "all_reduce of a number": lambda: total([0.5]),
        "all_gather of a number": lambda: gather(0.5),
        "metrics dict of 20 scalars": lambda: total(list(METRICS.values())),
        "barrier": dist.barrier,
        "all_gather of 5000 characters": lambda: gather(LONG),
        "all_gather of a dict with 1 MB": lambda: gather(BIG),
        "all_gather of an array of 1 MB": lambda: gather(ARRAY),
        "one rank first, with nothing to do": first,
    }


def _ignite(load: Callable[[str], Any]) -> Calls:
    peer = load("ignite.distributed")
    peer.sync()
    return {
        "all_gather of 20 characters": lambda: peer.all_gather(TEXT),
        "broadcast of 20 characters": lambda: peer.broadcast(TEXT, safe_mode=True),
        "one rank first, with nothing to do": lambda: _enter(peer.one_rank_first),
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
        "all_gather of a small dict": lambda: peer.all_gather_object(SMALL),
        "all_gather of a dict of 4 scalars": lambda: peer.all_gather_object(STATUS),
        "all_gather of a dict of 20 keys": lambda: peer.all_gather_object(METRICS),
        "broadcast of 20 characters": lambda: peer.broadcast_object_list([TEXT]),
        "broadcast of a small dict": lambda: peer.broadcast_object_list([SMALL]),
        "metrics dict of 20 scalars": lambda: peer.all_reduce_dict(dict(tensors)),
        "barrier": peer.barrier,
        "all_gather of 5000 characters": lambda: peer.all_gather_object(LONG),
        "all_gather of a dict with 1 MB": lambda: peer.all_gather_object(BIG),
        "all_gather of an array of 1 MB": lambda: peer.all_gather_object(ARRAY),
    }


def _accelerate(load: Callable[[str], Any]) -> Calls:
    state = load("accelerate").PartialState(cpu=True)
    peer = load("accelerate.utils")
    tensors = {key: torch.tensor(value) for key, value in METRICS.items()}
    return {
        "all_gather of 20 characters": lambda: peer.gather_object([TEXT]),
        "all_gather of a small dict": lambda: peer.gather_object([SMALL]),
        "all_gather of a dict of 4 scalars": lambda: peer.gather_object([STATUS]),
        "all_gather of a dict of 20 keys": lambda: peer.gather_object([METRICS]),
        "broadcast of 20 characters": lambda: peer.broadcast_object_list([TEXT]),
        "broadcast of a small dict": lambda: peer.broadcast_object_list([SMALL]),
        "all_reduce of a number": lambda: peer.reduce(torch.tensor(0.5), "sum"),
        "metrics dict of 20 scalars": lambda: peer.reduce(tensors, "sum"),
        "barrier": peer.wait_for_everyone,
        "all_gather of 5000 characters": lambda: peer.gather_object([LONG]),
        "all_gather of a dict with 1 MB": lambda: peer.gather_object([BIG]),
        "all_gather of an array of 1 MB": lambda: peer.gather_object([ARRAY]),
        "one rank first, with nothing to do": lambda: _enter(state.main_process_first),
    }


def _fabric(load: Callable[[str], Any]) -> Calls:
    fabric = load("lightning_fabric").Fabric(accelerator="cpu", devices=1, num_nodes=1)
    strategy = load("lightning_fabric.strategies").DDPStrategy(
        accelerator=fabric.accelerator, parallel_devices=[torch.device("cpu")]
    )
    return {
        "broadcast of 20 characters": lambda: strategy.broadcast(TEXT),
        "broadcast of a small dict": lambda: strategy.broadcast(SMALL),
        "all_reduce of a number": lambda: strategy.all_reduce(torch.tensor(0.5), reduce_op="sum"),
        "barrier": strategy.barrier,
    }


def _socket() -> Calls:
    kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
    with socket.socket(*kind) as listener:
        listener.bind("")  # the kernel chooses a name, which ends with the socket
        listener.listen()
        address = unisono.broadcast(listener.getsockname())
        if unisono.get_rank() == 0:
            wire = listener.accept()[0]
        else:
            wire = socket.socket(*kind)
            wire.connect(address)

    def swap(value: Any) -> Any:
        wire.send(pickle.dumps(value))
        return value, pickle.loads(wire.recv(1 << 16))

    def total(metrics: dict[str, float]) -> dict[str, float]:
        mine, other = swap(metrics)
        return {name: mine[name] + other[name] for name in mine}

    return {
        "all_gather of 20 characters": lambda: swap(TEXT),
        "all_gather of a small dict": lambda: swap(SMALL),
        "all_reduce of a number": lambda: sum(swap(0.5)),
        "metrics dict of 20 scalars": lambda: total(METRICS),
        "all_gather of 5000 characters": lambda: swap(LONG),
    }


PEERS: dict[str, Callable[[Callable[[str], Any]], Calls]] = {
    "ignite": _ignite,
    "mmengine": _mmengine,
    "accelerate": _accelerate,
    "lightning_fabric": _fabric,
}


def measure(local_rank: int, rounds: int, calls: int) -> list[Work]:
    """Time works of ours and of each peer that is installed. Collective over all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        libraries = {"unisono": _unisono(), "torch": _torch()}
        for name, made in PEERS.items():
            if importlib.util.find_spec(name) is not None:
                libraries[name] = made(importlib.import_module)
        if unisono.get_world_size() == 2:
            libraries[SOCKET] = _socket()
        done = []
        console = Console(stderr=True)
        with Progress(console=console, disable=local_rank != 0, transient=True) as progress:
            for name in progress.track(WORKS, description=f"{unisono.get_world_size()} ranks"):
                goal, bound = WORKS[name]
                mine = {library: has[name] for library, has in libraries.items() if name in has}
                timings = interleave(rounds, mine, calls)
                wire = timings.pop(SOCKET, None)
                done.append(Work(name, timings, goal, bound=bound))
                if wire is not None:
                    pair = {"unisono": timings["unisono"], SOCKET: wire}
                    goal = round(1 / BESIDE_SOCKET[name], 2)
                    done.append(Work(f"{name}, beside a socket", pair, goal, bound=PYTHON))
    return done


def main() -> int:
    """Measure and print."""
    made = parser("What isn't an accelerator tensor, against everybody else.", 21)
    made.add_argument("--nproc-per-node", type=int, default=2)
    made.add_argument("--calls", type=int, default=50, help="in a turn; default: %(default)s")
    made.add_argument("--plot", metavar="PNG")
    arguments = made.parse_args()
    size = arguments.nproc_per_node
    args = (arguments.rounds, arguments.calls)
    works = unisono.spawn("gloo", measure, args, nproc_per_node=size)[0]
    if arguments.plot:
        plot(works, arguments.plot)
    about = {"torch": torch.__version__, "ranks": size, "rounds": arguments.rounds}
    return ratio_report("Payloads", works, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
