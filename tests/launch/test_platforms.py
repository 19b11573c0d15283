"""Two nodes meet by the variables of each platform, and by nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import known, on_both
from tests.support.command import JOB, LIMIT_S, UNISONO, environ
from tests.support.platforms import ADDRESSES, ELASTIC, JOBS, NODES, Node
from tests.support.virtual_hosts import Hosts

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
DRIVER = str(Path(__file__).with_name("node.py"))
FLUX = Path(__file__).parents[1] / "data" / "environments"


@contextmanager
def drivers(hosts: Hosts) -> Iterator[list[Any]]:
    """Start a process on each host that takes part in one job after the other."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        running: list[Any] = []
        for index in range(2):
            words = hosts.on(index, [sys.executable, DRIVER])
            running.append(subprocess.Popen(words, env=environ(""), **pipes))
            stack.callback(stack.enter_context(running[-1]).kill)
        yield running
        for process in running:
            process.stdin.close()  # which ends it, and what it has started
            assert process.wait(LIMIT_S) == 0


def named(hosts: Hosts, nodes: list[Node]) -> AbstractContextManager[None]:
    """Let both hosts know the names of a job's nodes, as the platform's DNS does."""
    lines = ""
    for address, node in zip(hosts.addresses, nodes, strict=True):
        parts = node.host.split(".")
        names = [node.host, parts[0], f"{parts[0]}.cluster", ".".join(parts[:2])]
        lines += f"{address} {' '.join(dict.fromkeys(names))}\n" if node.host else ""
    return known(hosts.files, lambda text: text + lines)


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


def meets(hosts: Hosts, nodes: list[Any], job: str, folder: Path) -> object:
    """Run a job; give what is wrong, None if nothing is."""
    dumps = of(job)
    ranks = None if "ranks 2" in dumps[0].says else 1  # else one for each core
    nnodes = "auto" if job in ("pbs", "sge") else None  # which start the first host alone
    with named(hosts, dumps):
        for process, node in zip(nodes, dumps, strict=True):
            env = variables(node, hosts, folder)
            what = {"env": env, "host": node.host, "ranks": ranks, "nnodes": nnodes}
            what["runs"] = 4 if job == "skypilot" else 1  # at one port, one after the other
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        said = [json.loads(process.stdout.readline()) for process in nodes]
    count = ranks or 2
    names = [node.host or name for node, name in zip(dumps, hosts.names, strict=True)]
    expected = [
        [
            {
                "rank": node * count + local_rank,
                "world_size": 2 * count,
                "local_rank": local_rank,
                "node_rank": node,
                "nnodes": 2,
                "hosts": [name for name in names for _ in range(count)],
            }
            for local_rank in range(count)
        ]
        for node in (0, 1)
    ]
    return said if said != expected else None


@pytest.mark.parametrize("job", ["kubeflow-pytorchjob", *ELASTIC])
def test_unisono_run_meets_without_an_option(hosts: Hosts, job: str, tmp_path: Path) -> None:
    dumps = of(job)
    rename = ["sh", "-c", 'hostname "$0"; exec "$@"']
    words = [[*rename, node.host, *UNISONO, "run", JOB, "facts", "gloo"] for node in dumps]
    with named(hosts, dumps):
        done = on_both(hosts, words, *(variables(node, hosts, tmp_path) for node in dumps))
    who = "a node" if job in ELASTIC else "node 1"
    assert f"unisono run: {who} of 2, according to kubeflow" in done[1].err
    found = done[0].facts() + done[1].facts()
    if job in ELASTIC:  # where any node may be the first
        found.sort(key=lambda fact: int(fact["rank"]))
    assert [fact["rank"] for fact in found] == [0, 1, 2, 3]
    assert [fact["node_rank"] for fact in found] == [0, 0, 1, 1]
    assert [fact["world_size"] for fact in found] == [4] * 4


def test_flux_tells_each_rank(hosts: Hosts) -> None:
    envs = []
    for rank in range(2):
        lines = (FLUX / f"flux_2_2.rank{rank * 2}.env").read_text().splitlines()
        env = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
        halved = {"FLUX_TASK_RANK": str(rank), "FLUX_JOB_SIZE": "2"}  # the first of each node
        envs.append({**env, **halved, "MASTER_ADDR": hosts.addresses[0]})
    done = on_both(hosts, [[sys.executable, JOB, "facts", "gloo"]] * 2, *envs)
    found = [(fact["rank"], fact["node_rank"], fact["nnodes"]) for d in done for fact in d.facts()]
    assert found == [(0, 0, 2), (1, 1, 2)]
