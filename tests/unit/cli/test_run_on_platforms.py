"""``unisono run`` on a platform's node: what it starts by variables alone, and what it refuses."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from tests.support.command import JOB
from tests.support.platforms import NODES
from unisono.cli import main

ALONE = ["--nnodes", "1"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    """Give the exit code, the command that would run, and what is said besides."""
    with pytest.raises(SystemExit) as caught:
        main(["run", *words, "--print", JOB])
    said, code = capsys.readouterr(), caught.value.code
    assert isinstance(code, int)
    return code, shlex.split(said.out), said.err


def on(monkeypatch: pytest.MonkeyPatch, name: str, **changes: str) -> None:
    for variable, value in {**NODES[name].env, **changes}.items():
        monkeypatch.setenv(variable, value)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize(
    "job",
    ["kubeflow", "kubeflow-pytorchjob", "pai", "pytorchjob", "volcano", "skypilot", "sagemaker",
     "azureml", "tpu"],
)  # fmt: skip
def test_the_agent_gets_what_the_platform_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str
) -> None:
    node = NODES[f"{job}.node1"]
    on(monkeypatch, node.name)
    code, words, said = printed(capsys)
    assert code == 0, said
    assert (option(words, "--nnodes"), option(words, "--node-rank")) == ("2", "1")
    where = f"at {option(words, '--master-addr')}:{option(words, '--master-port')}"
    assert node.says.endswith(where)
    if "ranks 2" in node.says:
        assert option(words, "--nproc-per-node") == "2"
    assert f"unisono run: node 1 of 2, as {node.says.partition(',')[0]} says" in said


def test_options_come_before_the_platform(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, "skypilot.node1")
    _, words, _ = printed(capsys, "-n", "3", "--master-port", "4711")
    assert (option(words, "--nproc-per-node"), option(words, "--master-port")) == ("3", "4711")
    assert option(words, "--master-addr") == "10.0.0.1"
    code, _, said = printed(capsys, *ALONE)  # processes of this host, which have no command
    assert "launcher 'processes'" in said
    assert code != 0


def test_an_elastic_job_has_no_node_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, "kubeflow.node1", PET_NNODES="1:4")
    code, words, said = printed(capsys)
    assert code == 0, said
    assert option(words, "--nnodes") == "1:4"
    assert "--node-rank" not in words
    assert option(words, "--rdzv-endpoint") == "train-node-0-0.train:29400"


def test_restarts_are_what_kubeflow_says_where_the_user_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on(monkeypatch, "kubeflow-elastic.node1")
    for asked, restarts in (((), "3"), (("--max-restarts", "0"), "0")):
        code, words, said = printed(capsys, *asked)
        assert code == 0, said
        assert option(words, "--max-restarts") == restarts
        assert (option(words, "--nnodes"), option(words, "--rdzv-backend")) == ("2", "c10d")
    monkeypatch.setenv("PET_RDZV_BACKEND", "etcd-v2")
    assert "PET_RDZV_BACKEND='etcd-v2' isn't c10d or static" in printed(capsys)[2]
    monkeypatch.setenv("PET_NNODES", "1")
    assert "launcher 'processes'" in printed(capsys)[2]


def test_a_partial_set_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    code, _, said = printed(capsys)
    assert code != 0
    assert "skypilot environment: none of SKYPILOT_NODE_IPS, MASTER_ADDR is set" in said
    assert "--nnodes 1" in said
    assert "'processes'" in printed(capsys, *ALONE)[2]


@pytest.mark.parametrize(
    ("env", "warned"),
    [
        ("JOB_COMPLETION_INDEX=1", ""),
        ("VC_TASK_INDEX=0", "goes on alone: volcano environment: WORLD_SIZE is not set"),
        ("PBS_NODEFILE=/not/there", "goes on alone: pbs environment: PBS_NODEFILE='/not/there'"),
        ("TPU_WORKER_ID=0", "goes on alone: tpu environment: TPU_WORKER_HOSTNAMES"),
        ("PET_NODE_RANK=0", "goes on alone: kubeflow environment: PET_NNODES is not set"),
    ],
)
def test_where_nothing_says_that_there_are_several_nodes_it_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], env: str, warned: str
) -> None:
    monkeypatch.setenv(*env.split("="))
    said = printed(capsys)[2]
    assert warned in said
    assert "launcher 'processes' runs no command" in said  # it got as far as the ranks of this host
    if warned:
        code, _, said = printed(capsys, "--nnodes", "auto")
        assert code != 0
        assert "processes" not in said
    else:
        assert "alone" not in said


def test_the_hosts_of_pbs_are_used_where_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("c01\nc01\n" + f"{socket.gethostname()}\n" * 2)
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    code, words, said = printed(capsys, "--nnodes", "auto")
    assert code == 0, said
    assert (option(words, "--nnodes"), option(words, "--node-rank")) == ("2", "1")
    assert option(words, "--nproc-per-node") == "2"
    said = printed(capsys)[2]
    assert f"pbs gives the job 2 hosts (c01, {socket.gethostname()})" in said
    assert "--nnodes auto" in said
    assert "launcher 'processes' runs no command" in said
    assert "alone" not in printed(capsys, *ALONE)[2]
    for option_, which in {
        ("--launcher", "mpi"): "not for --launcher mpi",
        ("--launcher", "processes"): "not for --launcher processes",
        ("--backend", "mpi4py"): "not for mpi, which is that of --backend mpi4py",
    }.items():
        assert which in printed(capsys, "--nnodes", "auto", *option_)[2]
    for placed in (("--node-rank", "1"), ("--hosts", "c01,c02")):
        assert "--nnodes auto takes neither" in printed(capsys, "--nnodes", "auto", *placed)[2]
    with pytest.raises(SystemExit):
        main(["doctor"])
    said = " ".join(capsys.readouterr().out.split())
    assert "pbs starts a script on the first of its hosts alone" in said
    assert 'only with --nnodes auto, or nnodes="auto" to Parallel' in said


def test_a_rank_is_refused_beside_as_many_hosts_of_which_only_the_first_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text(f"{socket.gethostname()}\nc02\n")
    env = {"PBS_NODEFILE": str(nodes), "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "c01"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    code, _, said = printed(capsys, "-n", "2")
    assert code != 0
    assert "RANK=0 and WORLD_SIZE=2 are set, and nothing says" in said
    assert "alone" not in said
    code, words, said = printed(capsys, "-n", "2", "--nnodes", "auto")
    assert (code, option(words, "--node-rank"), option(words, "--nnodes")) == (0, "0", "2")
    assert "as pbs says" in said


def test_a_rank_that_may_be_a_node_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "c01"}.items():
        monkeypatch.setenv(name, value)
    code, _, said = printed(capsys, "-n", "2")
    assert code != 0
    assert "RANK=1 and WORLD_SIZE=2 are set, and nothing says" in said
    code, words, _ = printed(capsys, "-n", "1")  # both meanings are the same
    assert (code, option(words, "--node-rank"), option(words, "--nnodes")) == (0, "1", "2")
    monkeypatch.setenv("UNISONO_RANK_COUNTS", "nodes")
    code, words, _ = printed(capsys, "-n", "2")
    assert (code, option(words, "--node-rank"), option(words, "--nnodes")) == (0, "1", "2")
    monkeypatch.setenv("UNISONO_RANK_COUNTS", "ranks")
    assert "launcher 'processes'" in printed(capsys, "-n", "2")[2]


def in_a_task(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Be the only task of a host that Open MPI has started on two of them."""
    for name, value in {"RANK": rank, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


def test_a_task_of_a_launcher_that_is_alone_on_its_host_is_its_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_a_task(monkeypatch, 1)
    code, _, said = printed(capsys, "--nnodes", "auto")
    assert code != 0
    assert "--nnodes auto finds no platform" in said
    assert "openmpi says that it is rank 1 of 2" in said
    assert "UNISONO_RANK_COUNTS=nodes" in said
    assert "launcher 'processes'" in printed(capsys)[2]
    monkeypatch.setenv("UNISONO_RANK_COUNTS", "nodes")
    assert "MASTER_ADDR, which says where node 0 is, is not set" in printed(capsys)[2]
    monkeypatch.setenv("MASTER_ADDR", "c01")
    for words in ((), ("--nnodes", "auto")):
        code, command, said = printed(capsys, *words)
        assert code == 0, said
        assert (option(command, "--nnodes"), option(command, "--node-rank")) == ("2", "1")
        assert option(command, "--master-addr") == "c01"
    monkeypatch.delenv("UNISONO_RANK_COUNTS")
    monkeypatch.delenv("MASTER_ADDR")
    on(monkeypatch, "skypilot.node1")
    code, command, said = printed(capsys)
    assert code == 0, said
    assert (option(command, "--nnodes"), option(command, "--node-rank")) == ("2", "1")
    assert "node 1 of 2, as skypilot says" in said
