"""How fast values, CPU tensors and gradients travel between two hosts: ours, gloo's, Open MPI's.

The hosts are network namespaces of this machine, which root alone can make; `ip`, `nsenter` and
`unshare` must be there. All ranks share this machine's cores and memory. Without a delay, the hosts
are on one bridge. With one, they are on the virtual wire of the tests, as many kernels have no
netem. What that wire itself costs is measured first, with a bare socket over it and over a bridge;
a row where it is more than half of gloo's time is left out.

    python benchmarks/hosts.py [--ranks 2] [--delay 0.1] [--only string number ...] [--rounds 11]
                               [--json | --markdown]
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradients import BUCKETS, FLAT, averages, shapes
from harness import Timing, Work, interleave, parser, ratio_report, short
from tensors import has_mpi, slowest

import unisono

HOSTS = 2
PORT = 29500  # of a namespace that nobody else uses
TEXT = "twenty characters ok"
MIB = 1 << 20
GRADIENTS = sum(torch.Size(shape).numel() for shape in shapes())
LENGTHS = {
    **{"string": len(TEXT), "number": 8, "64 KB": MIB // 16, "1 MB": MIB, "16 MB": 16 * MIB},
    **{"100 MB": 100 * MIB, "gradients": 4 * GRADIENTS},
}
"""Of each work's data in bytes."""
ON_BRIDGE = {"64 KB": 2.0, "1 MB": 1.5, "16 MB": 1.3, "100 MB": 1.5}
"""How many times faster than gloo, with several ranks a host and no delay."""
OF_SEVERAL = 1.2
OF_ONE = {
    "string": 1.2,
    "number": 1.2,
    "64 KB": 1.2,
    "16 MB": 0.97,
    "100 MB": 0.97,
    "gradients": 0.97,
}
"""The same with a rank a host, where long tensors are gloo's own."""
BOUND = "All ranks of both hosts share this machine's cores."
Calls = dict[str, Callable[[], object]]


def calls_of(work: str) -> Calls:
    """Give each library's way to do a work, ours first."""
    mpi: Any = importlib.import_module("mpi4py.MPI") if has_mpi() else None
    length = LENGTHS[work] // 4
    if work == "string":
        strings: list[object] = [None] * dist.get_world_size()
        ours: Callable[[], object] = partial(unisono.all_gather, TEXT)
        calls = {"gloo": partial(dist.all_gather_object, strings, TEXT)}
        theirs = mpi and partial(mpi.COMM_WORLD.allgather, TEXT)
    elif work == "number":
        ours = partial(unisono.all_reduce, 0.5)
        calls = {"gloo": _sum_of_gloo}
        theirs = mpi and partial(mpi.COMM_WORLD.allreduce, 0.5)
    else:
        made = averages() if work == "gradients" else {}
        ours = made.get("unisono") or partial(unisono.all_reduce_, torch.zeros(length))
        calls = {"gloo": partial(dist.all_reduce, torch.zeros(length))}
        if made:
            calls = {BUCKETS: made[BUCKETS], FLAT: made[FLAT]}
        values = mpi and [torch.zeros(length).numpy(), mpi.FLOAT]
        theirs = mpi and partial(mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE, values)
    return {"unisono": ours, **calls, **({"Open MPI": theirs} if mpi else {})}


def _sum_of_gloo() -> float:
    tensor = torch.full((1,), 0.5, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def run_rank(arguments: Any) -> None:
    """Time every work, and leave in a file how long the slowest rank took."""
    torch.set_num_threads(1)
    unisono.initialize("gloo")
    found: dict[str, Mapping[str, Timing]] = {}
    for work in arguments.only:
        turns = max(1, min(20, 4 * MIB // LENGTHS[work]))
        found[work] = interleave(arguments.rounds, calls_of(work), turns)
    results = slowest(unisono.all_gather(found))
    if unisono.get_rank() == 0:
        Path(arguments.results).write_bytes(pickle.dumps(results))
    unisono.finalize()
    if has_mpi():
        importlib.import_module("mpi4py.MPI").Finalize()


def run_echo(address: str, *, is_server: bool) -> None:
    """Answer on a socket, or print how long each size takes there and back, in microseconds."""
    if is_server:
        with socket.create_server((address, PORT)) as server:
            print("ready", flush=True)
            peer, _ = server.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := peer.recv(MIB):
                peer.sendall(data)
        return
    with socket.create_connection((address, PORT)) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = {
            work: statistics.median(_echo(peer, length) for _ in range(51 if length < MIB else 5))
            for work, length in LENGTHS.items()
        }
    print(json.dumps(found))


def _echo(peer: socket.socket, length: int) -> float:
    data = bytes(length)
    start = time.perf_counter_ns()
    sending = threading.Thread(target=peer.sendall, args=(data,))
    if length < MIB:  # it fits in the buffers of the kernel
        peer.sendall(data)
    else:
        sending.start()
    while length > 0:
        length -= len(peer.recv(MIB))
    if sending.ident is not None:
        sending.join()
    return (time.perf_counter_ns() - start) / 1000


def echoes(made: Any) -> dict[str, float]:
    """Measure a bare socket between two hosts: microseconds there and back, by work."""
    words = [sys.executable, __file__, "--master", made.addresses[0], "--echo"]
    server = subprocess.Popen(made.on(0, [*words, "server"]), stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    server.stdout.readline()
    client = subprocess.check_output(made.on(1, [*words, "client"]), text=True)
    server.communicate()
    found: dict[str, float] = json.loads(client)
    return found


@contextmanager
def hosts(delay_s: float) -> Iterator[tuple[Path, Any, dict[str, float]]]:
    """Make the hosts. Give a folder, the hosts, and what the wire costs there and back, by work."""
    sys.path.append(str(Path(__file__).parents[1]))
    virtual: Any = importlib.import_module("tests.support.virtual_hosts")
    reason = virtual.why_no_wire() if delay_s else virtual.why_not()
    if reason is not None:
        sys.exit(f"there can be no two hosts here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with virtual.virtual_hosts(folder) as made:
            if not delay_s:
                yield folder, made, {}
                return
            bare = echoes(made)
        with virtual.virtual_wire(folder, virtual.LONGEST_UNIT) as (made, wire):
            quick = echoes(made)
            wire.delay_s = delay_s
            # What the delay does to TCP's windows isn't the wire's cost; that it comes late is.
            late = echoes(made)["string"] - quick["string"] - 2e6 * delay_s
            yield folder, made, {work: quick[work] - bare[work] + late for work in quick}


def start(made: Any, folder: Path, ranks: int, words: Sequence[str]) -> list[subprocess.Popen[str]]:
    """Start all ranks: by Open MPI where it is there, else one by one."""
    meeting = {
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": made.addresses[0],
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(HOSTS * ranks),
    }
    if has_mpi():
        return [_start_mpi(made, folder, ranks, words, meeting)]
    jobs = []
    for rank in range(HOSTS * ranks):
        environ = {**os.environ, **meeting, "RANK": str(rank)}
        jobs.append(subprocess.Popen(made.on(rank // ranks, words), env=environ, text=True))
    return jobs


def _start_mpi(
    made: Any, folder: Path, ranks: int, words: Sequence[str], meeting: Mapping[str, str]
) -> subprocess.Popen[str]:
    launcher: Any = importlib.import_module("unisono.launchers.mpi")
    agent = folder / "agent"  # what ssh is elsewhere: HOST COMMAND
    lines = ["#!/bin/sh", "host=$1; shift"]
    for index, name in enumerate(made.names):
        line = shlex.join(made.on(index, ["sh", "-c"]))
        lines.append(f'if [ "$host" = {name} ]; then exec {line} "$*"; fi')
    agent.write_text("\n".join(lines))
    agent.chmod(0o700)
    environ = {
        **launcher.environment(os.environ, is_root=True),
        **meeting,
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_prte_if_include": "eth0",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    places = ",".join(f"{name}:{ranks}" for name in made.names)
    options = ["--host", places, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    words = [launcher.find_mpiexec(), *options, *words]
    return subprocess.Popen(made.on(0, words), env=environ, text=True)


def works_of(
    found: Mapping[str, Mapping[str, Timing]], costs: Mapping[str, float], ranks: int, delay: float
) -> tuple[list[Work], list[str]]:
    """List the rows, and the works that the wire would dominate."""
    works, left_out = [], []
    for name, timings in found.items():
        cost = costs.get(name, 0.0)
        peer = BUCKETS if name == "gradients" else "gloo"  # which does the same work
        if cost > timings[peer].median / 2:
            left_out.append(name)
            continue
        several = OF_SEVERAL if delay else ON_BRIDGE.get(name, OF_SEVERAL)
        works.append(
            Work(
                f"{name}, wire {short(max(cost, 0.0))} us" if delay else name,
                timings,
                several if ranks > 1 else OF_ONE.get(name),
                bound=f"{BOUND} There and back takes {2 * delay:g} ms of delay alone.",
                peer=peer,
            )
        )
    return works, left_out


def main() -> int:
    """Measure and print."""
    made = parser("How fast values and tensors travel between two hosts.", 11)
    made.add_argument("--ranks", type=int, default=2, help="on each host")
    made.add_argument("--delay", type=float, default=0.0, help="of the wire, one way, in ms")
    made.add_argument("--only", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    made.add_argument("--echo", help="set by the benchmark itself: a bare socket's end")
    made.add_argument("--master", help="likewise: address of the first host")
    made.add_argument("--results", help="likewise: where the results go, in a rank")
    arguments = made.parse_args()
    if arguments.echo:
        run_echo(arguments.master, is_server=arguments.echo == "server")
        return 0
    if arguments.results:
        run_rank(arguments)
        return 0
    with hosts(arguments.delay / 1000) as (folder, places, costs):
        file = folder / "results"
        words = [sys.executable, __file__, *sys.argv[1:], "--results", str(file)]
        jobs = start(places, folder, arguments.ranks, words)
        if any(list(map(subprocess.Popen.wait, jobs))):
            sys.exit("a rank has failed, as it says above")
        found = pickle.loads(file.read_bytes())
    works, left_out = works_of(found, costs, arguments.ranks, arguments.delay)
    about = {"torch": torch.__version__, "hosts": HOSTS, "ranks of each": arguments.ranks}
    about |= {"delay": f"{arguments.delay:g} ms", "rounds": arguments.rounds}
    if left_out:
        about["left out, as the wire would dominate"] = ", ".join(left_out)
    return ratio_report("Hosts", works, about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
