"""Two nodes meet by the variables of each platform, and by nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.command import JOB, LIMIT_S, UNISONO, Done, environ, started
from tests.support.platforms import ADDRESSES, ELASTIC, JOBS, NODES, Node
from tests.support.virtual_hosts import Hosts

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
DRIVER = str(Path(__file__).with_name("node.py"))
FLUX = Path(__file__).parents[1] / "data" / "environments"


@contextmanager
def drivers(hosts: Hosts) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a process on each host that takes part in one job after the other."""
    with ExitStack() as stack:
        running = []
        for index in range(2):
            process = stack.enter_context(
                subprocess.Popen(
                    hosts.on(index, [sys.executable, DRIVER]),
                    env=environ(""),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            running.append(process)
        yield running
        for process in running:
            assert process.stdin is not None
            process.stdin.close()  # which ends it, and what it has started
            assert process.wait(LIMIT_S) == 0


@contextmanager
def known(hosts: Hosts, nodes: list[Node]) -> Iterator[None]:
    """Let both hosts know the names of a job's nodes."""
    before = [file.read_text() for file in hosts.files]
    lines = ""
    for address, node in zip(hosts.addresses, nodes, strict=True):
        short = node.host.partition(".")[0]
        names = [node.host, short, f"{short}.cluster", *also(node)]
        lines += f"{address} {' '.join(dict.fromkeys(names))}\n" if node.host else ""
    try:
        for file, text in zip(hosts.files, before, strict=True):
            file.write_text(text + lines)
        yield
    finally:
        for file, text in zip(hosts.files, before, strict=True):
            file.write_text(text)


def also(node: Node) -> list[str]:
    """Give the node's name with its subdomain, as the platform's DNS knows it."""
    return [".".join(node.host.split(".")[:2])]


def variables(node: Node, hosts: Hosts, folder: Path) -> Mapping[str, str]:
    """Give a dump's variables, with these hosts' addresses and files that are here."""
    text = json.dumps(dict(node.env))
    for dumped, address in zip(ADDRESSES, hosts.addresses, strict=True):
        text = text.replace(dumped, address)
    for path, lines in node.files.items():
        file = folder / node.name
        file.write_text(lines)
        text = text.replace(path, str(file))
    env: dict[str, str] = json.loads(text)
    return env


def of(job: str) -> list[Node]:
    return [NODES[f"{job}.node{number}"] for number in (0, 1)]


def test_parallel_meets_by_variables_alone(hosts: Hosts, tmp_path: Path) -> None:
    """On every platform; one process on each host takes part in all jobs, which saves its start."""
    with drivers(hosts) as nodes:
        wrong = {job: said for job in JOBS if (said := meets(hosts, nodes, job, tmp_path))}
    assert not wrong


def meets(hosts: Hosts, nodes: list[subprocess.Popen[str]], job: str, folder: Path) -> object:
    """Run a job; give what is wrong, None if nothing is."""
    dumps = of(job)
    ranks = None if "ranks 2" in dumps[0].says else 1  # else one for each core
    nnodes = "auto" if job in ("pbs", "sge") else None  # which start the first host alone
    with known(hosts, dumps):
        for process, node in zip(nodes, dumps, strict=True):
            env = variables(node, hosts, folder)
            assert process.stdin is not None
            what = {"env": env, "host": node.host, "ranks": ranks, "nnodes": nnodes}
            what["runs"] = 4 if job == "skypilot" else 1  # at one port, one after the other
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        said = []
        for process in nodes:
            assert process.stdout is not None
            said.append(json.loads(process.stdout.readline()))
    count = ranks or 2
    expected = [
        [
            {
                "rank": node * count + local_rank,
                "world_size": 2 * count,
                "local_rank": local_rank,
                "node_rank": node,
                "nnodes": 2,
                "hosts": [name for name in names(hosts, dumps) for _ in range(count)],
            }
            for local_rank in range(count)
        ]
        for node in (0, 1)
    ]
    return said if said != expected else None


def names(hosts: Hosts, dumps: list[Node]) -> list[str]:
    pairs = zip(dumps, hosts.names, strict=True)
    return [node.host or name for node, name in pairs]


@pytest.mark.parametrize("job", ["kubeflow-pytorchjob", *ELASTIC])
def test_unisono_run_meets_without_an_option(hosts: Hosts, job: str, tmp_path: Path) -> None:
    dumps, found = of(job), []
    with known(hosts, dumps), ExitStack() as stack:
        jobs = []
        for index, node in enumerate(dumps):
            words = ["sh", "-c", 'hostname "$0"; exec "$@"', node.host]
            words = hosts.on(index, [*words, *UNISONO, "run", JOB, "facts", "gloo"])
            env = variables(node, hosts, tmp_path)
            jobs.append(stack.enter_context(started(words, **env)))
        for job_ in jobs:
            assert job_.process.wait(LIMIT_S) == 0, job_.err() + job_.out()
            found += Done(0, job_.out(), job_.err(), 0.0).facts()
        who = "a node" if job in ELASTIC else "node 1"
        assert f"unisono run: {who} of 2, as kubeflow says" in jobs[1].err()
    if job in ELASTIC:  # where any node may be the first
        found.sort(key=lambda fact: int(fact["rank"]))
    assert [fact["rank"] for fact in found] == [0, 1, 2, 3]
    assert [fact["node_rank"] for fact in found] == [0, 0, 1, 1]
    assert [fact["world_size"] for fact in found] == [4] * 4


def test_flux_tells_each_rank(hosts: Hosts) -> None:
    with ExitStack() as stack:
        jobs = []
        for rank in range(2):
            lines = (FLUX / f"flux_2_2.rank{rank * 2}.env").read_text().splitlines()
            env = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
            halved = {"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": "2"}  # the first of each node
            env = {**env, **halved, "MASTER_ADDR": hosts.addresses[0]}
            words = hosts.on(rank, [sys.executable, JOB, "facts", "gloo"])
            jobs.append(stack.enter_context(started(words, **env)))
        for job in jobs:
            assert job.process.wait(LIMIT_S) == 0, job.err() + job.out()
        found = [fact for job in jobs for fact in Done(0, job.out(), job.err(), 0.0).facts()]
    assert [(fact["rank"], fact["node_rank"], fact["nnodes"]) for fact in found] == [
        (0, 0, 2),
        (1, 1, 2),
    ]
