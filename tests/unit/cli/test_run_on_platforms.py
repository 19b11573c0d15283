"""``unisono run`` on a platform's node: what it starts by variables alone, and what it refuses."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from tests.support.command import JOB
from tests.support.platforms import NODES
from tests.support.screens import run

HERE = socket.gethostname()
TASK = {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
IN_A_TASK = " ".join(f"OMPI_COMM_WORLD_{name}={value}" for name, value in TASK.items())
"""The only one of a host that Open MPI has started on two of them."""
AS_A_NODE = f"{IN_A_TASK} UNISONO_RANK_COUNTS=nodes"
ELASTIC = "kubeflow-elastic.node1"
BY_ETCD = f"{ELASTIC} PET_RDZV_BACKEND=etcd-v2"
PARTIAL = "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2"
RANK = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=c01"
UNSAID = "RANK=1 and WORLD_SIZE=2 are set, and it is unknown"
ON_PBS = f"PBS_NODEFILE=c01,c01,{HERE},{HERE}"
RANK_ON_PBS = f"PBS_NODEFILE={HERE},c02 RANK=0 WORLD_SIZE=2 MASTER_ADDR=c01"
ONE = "launcher 'processes' runs no command"
"""It got as far as the ranks of this host, which have no command."""
NODE = "nnodes=2 node-rank=1"
DIGITS = "master-addr=digits-master-0 master-port=23456"
STARTED = [
    # The words of the user come before the platform's.
    ("skypilot.node1", "-n 3 --master-port 4711", "nproc-per-node=3 master-port=4711"),
    # The agent gets what the platform says, where a RANK is set, too.
    ("kubeflow.node1", "", f"{NODE} nproc-per-node=2 master-port=29400 says=kubeflow"),
    ("kubeflow-pytorchjob.node1", "", f"{NODE} nproc-per-node=2 {DIGITS} says=kubeflow"),
    ("pai.node1", "", f"{NODE} nproc-per-node=2 master-port=23456 says=pai"),
    ("pytorchjob.node1", "", f"{NODE} {DIGITS} says=pytorchjob"),
    ("volcano.node1", "", f"{NODE} master-addr=train-worker-0.train says=volcano"),
    ("skypilot.node1", "", f"{NODE} nproc-per-node=2 master-addr=10.0.0.1 says=skypilot"),
    ("sagemaker.node1", "", f"{NODE} nproc-per-node=2 master-addr=algo-1 says=sagemaker"),
    ("azureml.node1", "", f"{NODE} master-addr=10.0.0.1 master-port=6105 says=azureml"),
    ("tpu.node1", "", f"{NODE} master-addr=tpu-job-0.headless-svc says=tpu"),
    # An elastic job has no node rank.
    ("kubeflow.node1 PET_NNODES=1:4", "", "nnodes=1:4 node-rank="),
    ("kubeflow.node1 PET_NNODES=1:4", "", "rdzv-endpoint=train-node-0-0.train:29400"),
    # Restarts are what Kubeflow says where the user says nothing.
    (ELASTIC, "", "max-restarts=3 nnodes=2 rdzv-backend=c10d"),
    (ELASTIC, "--max-restarts 0", "max-restarts=0 nnodes=2 rdzv-backend=c10d"),
    (ON_PBS, "--nnodes auto", "nnodes=2 node-rank=1 nproc-per-node=2"),
    (RANK_ON_PBS, "-n 2 --nnodes auto", "nnodes=2 node-rank=0 says=pbs"),
    # What may be a rank or a node is both with one rank on each.
    (RANK, "-n 1", "nnodes=2 node-rank=1"),
    (f"{RANK} UNISONO_RANK_COUNTS=nodes", "-n 2", "nnodes=2 node-rank=1"),
    (f"{AS_A_NODE} MASTER_ADDR=c01", "", "nnodes=2 node-rank=1 master-addr=c01"),
    (f"{AS_A_NODE} MASTER_ADDR=c01", "--nnodes auto", "nnodes=2 node-rank=1"),
    (f"skypilot.node1 {IN_A_TASK}", "--nnodes auto", "nnodes=2 node-rank=1 says=skypilot"),
    (f"skypilot.node1 {IN_A_TASK}", "", "nnodes=2 node-rank=1"),
]  # fmt: skip
REFUSED = [
    ("skypilot.node1", "--nnodes 1", [ONE]),
    (BY_ETCD, "", ["PET_RDZV_BACKEND='etcd-v2' isn't c10d or static"]),
    (f"{BY_ETCD} PET_NNODES=1", "", [ONE]),
    # A set of variables that isn't whole is refused before anything starts.
    (PARTIAL, "", ["skypilot environment: none of SKYPILOT_NODE_IPS, MASTER_ADDR is set"]),
    (PARTIAL, "", ["--nnodes 1"]),
    (PARTIAL, "--nnodes 1", [ONE]),
    # The hosts of PBS are used where the user says so.
    (ON_PBS, "", [f"pbs gives the job 2 hosts (c01, {HERE})", "--nnodes auto", ONE]),
    (ON_PBS, "--nnodes 1", [ONE, "!alone"]),
    (ON_PBS, "--nnodes auto --launcher mpi", ["not for mpi"]),
    (ON_PBS, "--nnodes auto --launcher processes", ["not for processes"]),
    (ON_PBS, "--nnodes auto --backend mpi4py", ["not for mpi"]),
    (ON_PBS, "--nnodes auto --node-rank 1", ["--nnodes auto takes neither"]),
    (ON_PBS, "--nnodes auto --hosts c01,c02", ["--nnodes auto takes neither"]),
    # A rank beside as many hosts, of which only the first is started.
    (RANK_ON_PBS, "-n 2", ["RANK=0 and WORLD_SIZE=2 are set, and it is unknown", "!alone"]),
    (RANK, "-n 2", [UNSAID]),
    (f"{RANK} UNISONO_RANK_COUNTS=ranks", "-n 2", [ONE]),
    (IN_A_TASK, "--nnodes auto", ["--nnodes auto: no platform", "UNISONO_RANK_COUNTS=nodes"]),
    (IN_A_TASK, "--nnodes auto", ["openmpi reports rank 1 of 2"]),
    (IN_A_TASK, "", [ONE]),
    (AS_A_NODE, "", ["MASTER_ADDR, the address of node 0, is not set"]),
]  # fmt: skip


def printed(*words: str) -> tuple[int, list[str], str]:
    """Return the exit code, the command that would run, and what is said besides."""
    done = run("run", *words, "--print", JOB)
    return done.code, shlex.split(done.out), done.err


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1] if name in words else ""


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have the variables of a node, by its name, and those that are given."""
    for word in request.param.split():
        name, _, value = word.partition("=")
        env = {name: value} if value else NODES[name].env
        if name == "PBS_NODEFILE" and not value.startswith("/"):
            env = {name: str(tmp_path / "nodes")}
            (tmp_path / "nodes").write_text("".join(f"{host}\n" for host in value.split(",")))
        for variable, text in env.items():
            monkeypatch.setenv(variable, text)


@pytest.mark.parametrize(("on", "given", "options"), STARTED, indirect=["on"])
@pytest.mark.usefixtures("on")
def test_what_is_started(given: str, options: str) -> None:
    code, words, said = printed(*given.split())
    assert code == 0, said
    for each in options.split():
        name, _, value = each.partition("=")
        if name == "says":
            number = option(words, "--node-rank")
            assert f"unisono run: node {number} of 2, according to {value}" in said
        else:
            assert option(words, f"--{name}") == value


@pytest.mark.parametrize(("on", "given", "reasons"), REFUSED, indirect=["on"])
@pytest.mark.usefixtures("on")
def test_what_is_refused(given: str, reasons: list[str]) -> None:
    code, _, said = printed(*given.split())
    assert code != 0
    for reason in reasons:
        assert (reason.lstrip("!") in said) != reason.startswith("!")


@pytest.mark.parametrize(
    ("on", "warned"),
    [
        ("JOB_COMPLETION_INDEX=1", ""),
        ("VC_TASK_INDEX=0", "continues alone: volcano environment: WORLD_SIZE is not set"),
        ("PBS_NODEFILE=/not/there", "continues alone: pbs environment: PBS_NODEFILE='/not/there'"),
        ("TPU_WORKER_ID=0", "continues alone: tpu environment: TPU_WORKER_HOSTNAMES"),
        ("PET_NODE_RANK=0", "continues alone: kubeflow environment: PET_NNODES is not set"),
    ],
    indirect=["on"],
)
@pytest.mark.usefixtures("on")
def test_where_nothing_says_that_there_are_several_nodes_it_goes_on_alone(warned: str) -> None:
    said = printed()[2]
    assert warned in said
    assert ONE in said
    if warned:
        code, _, said = printed("--nnodes", "auto")
        assert code != 0
        assert "processes" not in said
    else:
        assert "alone" not in said


@pytest.mark.parametrize("on", [ON_PBS], indirect=True)
@pytest.mark.usefixtures("on")
def test_doctor_says_how_the_hosts_of_pbs_are_used() -> None:
    said = " ".join(run("doctor").out.split())
    assert "pbs starts a script on the first of its hosts alone" in said
    assert 'only with --nnodes auto, or nnodes="auto" to Parallel' in said
