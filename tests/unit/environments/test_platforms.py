"""Which node is this: dumps of platforms, sets that are partial or wrong, and what is ambiguous."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.platforms import NODES, facts
from unisono import diagnosis
from unisono.environments.detection import detect
from unisono.environments.nodes import (
    ambiguity,
    detect_node,
    explain_nodes,
    is_gap,
    meaning,
    not_a_node,
)
from unisono.environments.platforms import PLATFORMS, Machine
from unisono.errors import EnvironmentDetectionError
from unisono.topology import NodeInfo, RankInfo


def _read(path: str) -> str:
    """Read a file whose path is its text, with + for a blank and | for the end of a line."""
    if path.startswith("/not/"):
        raise FileNotFoundError(path)
    return path.replace("+", " ").replace("|", "\n")


HERE = Machine(lambda: "host", lambda: "10.0.0.9", _read)


def node(words: str, host: str = "", **more: str) -> tuple[Mapping[str, str], Machine]:
    """Give the variables of a dump, if one is named, with these changes, and its machine.

    A variable with an empty value is left out.
    """
    env, machine = dict[str, str](), HERE
    for word in words.split():
        name, is_pair, value = word.partition("=")
        if is_pair:
            env[name] = value
        else:
            env, machine = {**NODES[name].env}, NODES[name].machine()
    if host:
        machine = replace(machine, name=lambda: host)
    return MappingProxyType({name: text for name, text in {**env, **more}.items() if text}), machine


def found(words: str, host: str = "", *, is_asked: bool = False, **more: str) -> NodeInfo:
    info = detect_node(*node(words, host, **more), is_asked=is_asked)
    assert info is not None
    return info


def refused(words: str, host: str = "", **more: str) -> EnvironmentDetectionError:
    with pytest.raises(EnvironmentDetectionError) as caught:
        detect_node(*node(words, host, **more))
    error = caught.value
    assert str(error).startswith(f"{error.source} environment: ")
    assert error.variable in str(error)
    assert "--nnodes 1" in str(error)  # the remedy that always helps
    return error


def verdicts(env: Mapping[str, str], machine: Machine, *plugins: Any) -> dict[str, str]:
    findings = explain_nodes(env, machine, plugins)
    assert [each.source for each in findings] == [each.NAME for each in PLATFORMS]
    return {each.source: each.verdict for each in findings if each.verdict != "absent"}


@pytest.mark.parametrize("name", NODES)
def test_dump(name: str) -> None:
    assert facts(found(name)) == NODES[name].says


def test_every_platform_has_a_dump() -> None:
    stated = {"stated"}  # no platform's, but the user's word
    assert {found(name).source for name in NODES} | stated == {each.NAME for each in PLATFORMS}


# What is left out of a dump, one case after the other.
LACKING = {
    "kubeflow.node1": "PET_NNODES; PET_MASTER_ADDR",
    "kubeflow-pytorchjob.node1": "PET_NNODES RANK WORLD_SIZE",
    "pai.node1": "RANK; WORLD_SIZE",
    "pytorchjob.node1": "RANK; WORLD_SIZE",
    "pytorchjob-operator.node0": "RANK; WORLD_SIZE",
    "volcano.node1": "VC_TASK_INDEX VK_TASK_INDEX",
    "volcano-pytorch.node1": "WORLD_SIZE",
    "skypilot.node1": "SKYPILOT_NODE_IPS",
    "aws-batch.node1": "AWS_BATCH_JOB_NUM_NODES; AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
    "sagemaker.node1": "SM_HOSTS; SM_CURRENT_HOST",
    "azureml.node1": "NODE_RANK RANK WORLD_SIZE",
    "tpu.node1": "TPU_WORKER_HOSTNAMES",
}


def cases(table: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, case) for name, text in table.items() for case in text.split("; ")]


@pytest.mark.parametrize(("name", "missing"), cases(LACKING))
def test_a_partial_set_is_refused_by_name(name: str, missing: str) -> None:
    names = missing.split()
    error = refused(name, **dict.fromkeys(names, ""))
    assert all(each in str(error) for each in names if each not in ("RANK", "WORLD_SIZE"))
    assert names[0] in str(error)
    assert is_gap(error, may_be_several=True)
    assert error.value is None
    assert error.source == name.partition(".")[0].partition("-")[0].replace("aws", "aws-batch")


WRONG = {
    "kubeflow.node1": (
        "PET_NODE_RANK=2; PET_NODE_RANK=one; PET_NNODES=0; PET_NNODES=4:2; PET_MASTER_PORT=0; "
        "PET_MASTER_PORT=70000; PET_NPROC_PER_NODE=many; PET_MASTER_ADDR=two words; "
        "PET_RDZV_BACKEND=etcd"
    ),
    "kubeflow-elastic.node1": "PET_RDZV_BACKEND=etcd-v2; PET_MAX_RESTARTS=many",
    "pai.node1": "RANK=2; NPROC_PER_NODE=-1",
    "volcano.node1": "VC_TASK_INDEX=2; VC_WORKER_HOSTS= , ",
    "pytorchjob.node1": "WORLD_SIZE=1",
    "kubernetes.node1": "JOB_COMPLETION_INDEX=-1",
    "skypilot.node1": "SKYPILOT_NODE_IPS=10.0.0.1",
    "aws-batch.node0": "AWS_BATCH_JOB_MAIN_NODE_INDEX=2",
    "aws-batch.node1": (
        "AWS_BATCH_JOB_NODE_INDEX=7; AWS_BATCH_JOB_MAIN_NODE_INDEX=7; AWS_BATCH_JOB_NUM_NODES=1"
    ),
    "sagemaker.node1": "SM_CURRENT_HOST=algo-3; SM_HOSTS=algo-1,algo-2; SM_HOSTS=[1, 2]",
    "azureml.node1": "NODE_RANK=2; AZUREML_NODE_COUNT=two; AZUREML_NODE_COUNT=1:4",
    "pbs.node1": "PBS_NODEFILE=/not/there",
    "sge.node1": "PE_HOSTFILE=/not/there",
    "tpu.node1": "TPU_WORKER_ID=2",
}
# Where another variable is at fault by what was changed, which is named as well.
NAMED = {
    ("aws-batch.node1", "AWS_BATCH_JOB_NUM_NODES"): "AWS_BATCH_JOB_NODE_INDEX",
    ("pytorchjob.node1", "WORLD_SIZE"): "RANK",
}


@pytest.mark.parametrize(("name", "case"), cases(WRONG))
def test_a_wrong_variable_is_refused_by_name(name: str, case: str) -> None:
    variable, _, value = case.partition("=")
    beside = "RANK= WORLD_SIZE= LOCAL_RANK=" if name.startswith("azureml") else ""  # else a rank
    error = refused(f"{name} {beside}", **{variable: value})
    assert is_gap(error, may_be_several=True) == (error.source in ("pbs", "sge"))
    expected = NAMED.get((name, variable), variable)
    assert error.variable == expected
    assert expected != variable or value.strip() in str(error)


@pytest.mark.parametrize(
    ("words", "host", "variable", "said"),
    [
        ("PBS_NODEFILE=c01|c02", "login.cluster", "PBS_NODEFILE", "cluster', doesn't match "),
        ("volcano.node1 VC_PS_HOSTS=train-ps-0.train VC_PS_NUM=1", "", "VC_PS_HOSTS",
         "VC_PS_HOSTS and VC_WORKER_HOSTS are lists, .*pytorch"),
        ("kubernetes.node1", "train-1", "MASTER_ADDR", "headless Service"),
        ("kubernetes.node1", "web.train.svc", "MASTER_ADDR", "doesn't end with JOB_"),
    ],
)  # fmt: skip
def test_what_numbers_no_node_is_refused(words: str, host: str, variable: str, said: str) -> None:
    error = refused(words, host)
    assert error.variable == variable
    assert re.search(said, str(error))


def test_several_slices_are_told_what_counts_the_hosts_of_all() -> None:
    error = refused("tpu.node1 MEGASCALE_NUM_SLICES=2")
    assert (error.source, error.variable, error.value) == ("tpu", "PET_NODE_RANK", None)
    assert "MEGASCALE_NUM_SLICES=2, and TPU_WORKER_ID counts only the hosts of one" in str(error)
    assert "set PET_NODE_RANK, PET_NNODES and PET_MASTER_ADDR" in str(error)
    assert "set TPU_WORKER_ID" not in str(error)
    assert is_gap(error, may_be_several=True)  # a bare Parallel() warns, and continues alone
    assert not is_gap(error, may_be_several=False)


AWS = "aws-batch.node1 AWS_BATCH_JOB_NUM_NODES=4 AWS_BATCH_JOB_MAIN_NODE_INDEX=2"
BY_USER = "MASTER_ADDR=fd00::7 MASTER_PORT=4711"
GENERAL = "MASTER_ADDR=c07 MASTER_PORT=4711 PET_MASTER_ADDR=c01"
ONE = "0 of 1:1 at None:29500"
POD = "train-0.train.default.svc.cluster.local:29500"
SEATED = "PET_RDZV_ENDPOINT=digits-worker-0:23456 PET_NNODES=1:4"
FOUND = {
    # Nodes seat themselves, in a job of an indexed Job at its first pod.
    f"kubeflow.node1 PET_NODE_RANK= PET_MASTER_ADDR= PET_MASTER_PORT= {SEATED}": (
        "None of 1:4 at digits-worker-0:23456"
    ),
    "kubernetes.node0 PET_NNODES=1:4": f"None of 1:4 at {POD}",
    "kubernetes.node1 PET_NNODES=1:4": f"None of 1:4 at {POD}",
    "kubeflow.node1 PET_NNODES=2:2": "1 of 2:2 at train-node-0-0.train:29400",
    "PET_RDZV_ENDPOINT=c01:23456 PET_NNODES=2 MASTER_PORT=4711": "None of 2:2 at c01:23456",
    # One node needs no leader.
    "kubernetes.node0 PET_NNODES=1": ONE,
    "skypilot.node0 SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_IPS=10.0.0.1": ONE,
    'sagemaker.node0 SM_HOSTS=["algo-1"]': ONE,
    "kubeflow.node1 PET_NNODES=1 PET_NODE_RANK=0 PET_RDZV_BACKEND=etcd": ONE,
    "JOB_COMPLETION_INDEX=3 PET_NNODES=1": ONE,
    # The main node of AWS Batch leads, whatever its index.
    f"{AWS} AWS_BATCH_JOB_NODE_INDEX=0": "1 of 4:4 at 10.0.0.1:29500",
    f"{AWS} AWS_BATCH_JOB_NODE_INDEX=1": "2 of 4:4 at 10.0.0.1:29500",
    f"{AWS} AWS_BATCH_JOB_NODE_INDEX=2": "0 of 4:4 at 10.0.0.1:29500",
    f"{AWS} AWS_BATCH_JOB_NODE_INDEX=3": "3 of 4:4 at 10.0.0.1:29500",
    # The user's address and port come first, torchrun's names before the general ones.
    **{
        f"{job}.node1 {BY_USER}": "1 of 2:2 at fd00::7:4711"
        for job in ("skypilot", "aws-batch", "sagemaker", "pbs", "sge", "tpu", "kubernetes")
    },
    f"kubeflow.node1 {GENERAL} PET_MASTER_PORT=": "1 of 2:2 at c01:4711",
    f"kubeflow.node1 {GENERAL}": "1 of 2:2 at c01:29400",
    f"kubernetes.node1 {GENERAL}": "1 of 2:2 at c01:4711",
    f"kubernetes.node1 {GENERAL} PET_MASTER_PORT=29400": "1 of 2:2 at c01:29400",
    "tpu.node1 MEGASCALE_NUM_SLICES=2 PET_NODE_RANK=3 PET_NNODES=4 PET_MASTER_ADDR=tpu-0": (
        "3 of 4:4 at tpu-0:29500"
    ),
    # Hosts stand between commas or blanks.
    "skypilot.node1 SKYPILOT_NODE_IPS=10.0.0.1,10.0.0.2": "1 of 2:2 at 10.0.0.1:29500",
    # A master is told a loopback address; Azure's only rank of a node may start more.
    "pytorchjob-operator.node0 MASTER_ADDR=127.0.0.1": "0 of 2:2 at digits-master-0:23456",
    "azureml.node1 LOCAL_RANK=": "1 of 2:2 at 10.0.0.1:6105",
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=c01 UNISONO_RANK_COUNTS=nodes": "1 of 2:2 at c01:29500",
}


@pytest.mark.parametrize(("words", "said"), FOUND.items())
def test_who_the_node_is(words: str, said: str) -> None:
    info = found(words)
    where = f"{info.master_addr}:{info.master_port}"
    assert f"{info.node_rank} of {info.nnodes}:{info.max_nnodes} at {where}" == said
    assert not info.is_ambiguous


def test_a_pod_without_a_service_goes_by_the_address_that_is_given() -> None:
    for host in ("train-1", "web.train.svc"):
        assert found("kubernetes.node1 MASTER_ADDR=c01", host).master_addr == "c01"


def test_what_is_said_of_ranks_and_restarts() -> None:
    assert found("kubeflow-elastic.node1").max_restarts == 3
    assert found("kubeflow.node1").max_restarts is None
    for way in ("c10d", "static", " "):
        assert facts(found("kubeflow.node1", PET_RDZV_BACKEND=way)) == NODES["kubeflow.node1"].says
    assert found("skypilot.node0 SKYPILOT_NUM_GPUS_PER_NODE=0").nproc_per_node is None
    assert found("kubeflow.node0 PET_NPROC_PER_NODE=auto").nproc_per_node == "auto"


BARE = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=c01"
RANK = "RANK=1 WORLD_SIZE=4 MASTER_ADDR=c01 MASTER_PORT=4711"
OPERATOR = "pytorchjob-operator.node0 MASTER_ADDR=127.0.0.1"
# What Parallel takes for a rank, and `unisono run` refuses.
AMBIGUOUS = [
    BARE,
    # A pod's name is needed for what its rank counts.
    "pytorchjob.node1 HOSTNAME=",
    "pytorchjob.node1 HOSTNAME=other-worker-0",
    "pytorchjob.node1 HOSTNAME=digits-worker-4",
    "pytorchjob.node1 MASTER_ADDR=c01",
    f"pytorchjob.node1 {SEATED} WORLD_SIZE=8 HOSTNAME=c01",
    # A loopback address is told the master itself; elsewhere somebody may have set it by hand.
    *(f"{OPERATOR} HOSTNAME={pod}" for pod in ("digits-worker-0", "digits-master-1", "c01")),
    f"{OPERATOR} RANK=1",
    "pytorchjob-operator.node0 MASTER_ADDR=127.0.0.2",
    # A rank stays a rank beside a platform that says something else.
    f"{RANK} JOB_COMPLETION_INDEX=1",
    f"{RANK} JOB_COMPLETION_INDEX=1 PET_NNODES=many",
    f"{RANK} PBS_NODEFILE=/not/there",
    f"{RANK} PBS_NODEFILE=host",
    f"{RANK} SKYPILOT_NODE_RANK=1",
    f"{RANK} SKYPILOT_NODE_RANK=0 SKYPILOT_NUM_NODES=1 SKYPILOT_NUM_GPUS_PER_NODE=4",
    f"{RANK} AZUREML_NODE_COUNT=2",
]


@pytest.mark.parametrize("words", AMBIGUOUS)
def test_what_rank_and_world_size_count_may_be_ambiguous(words: str) -> None:
    info = found(words)
    assert (info.is_ambiguous, info.nnodes) == (True, int(node(words)[0]["WORLD_SIZE"]))
    assert detect_node(*node(f"{words} UNISONO_RANK_COUNTS=ranks")) is None


def test_what_is_ambiguous_is_refused_with_all_remedies() -> None:
    error = ambiguity(found(BARE))
    assert error.variable == "RANK"
    for remedy in ("UNISONO_RANK_COUNTS=nodes", "UNISONO_RANK_COUNTS=ranks", "--nnodes"):
        assert remedy in str(error)
    assert "AMBIGUOUS" in str(meaning(*node(BARE)))
    assert detect(node(f"{BARE} UNISONO_RANK_COUNTS=nodes")[0]) is None
    said = meaning(*node(f"{BARE} UNISONO_RANK_COUNTS=ranks"))
    assert said == "RANK=1 and WORLD_SIZE=2 count ranks"
    for ask in (detect_node, lambda env, _: detect(env)):
        with pytest.raises(EnvironmentDetectionError, match="UNISONO_RANK_COUNTS='pods' should be"):
            ask(*node(f"{BARE} UNISONO_RANK_COUNTS=pods"))


NO_NODE = [
    # What tells a rank leaves no doubt.
    f"{BARE} LOCAL_RANK=0",
    f"{BARE} GROUP_RANK=1",
    f"{BARE} LOCAL_WORLD_SIZE=1",
    f"{BARE} TORCHELASTIC_RUN_ID=b5a7",
    f"{BARE} RANK=0 WORLD_SIZE=1",
    "azureml.node1 LOCAL_RANK=1",
    "azureml.node1 LOCAL_RANK=0 WORLD_SIZE=4 RANK=2",
    "azureml.node1 UNISONO_RANK_COUNTS=ranks",
    "ALPS_APP_PE=1 PMI_SIZE=4 PBS_NODEFILE=/not/there",
    "ALPS_APP_PE=1 PMI_SIZE=4 PBS_NODEFILE=/not/there SKYPILOT_NODE_RANK=1",
    # A pod of a sweep works alone.
    "JOB_COMPLETION_INDEX=3",
]


@pytest.mark.parametrize("words", NO_NODE)
def test_a_rank_and_what_is_alone_are_no_nodes(words: str) -> None:
    assert detect_node(*node(words)) is None


LOCAL = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"
ONE_EACH = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1"
AGENT = "GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none"


@pytest.mark.parametrize("name", NODES)
def test_a_rank_on_a_platform_is_no_node(name: str) -> None:
    """What `unisono run` and torchrun start there has the platform's variables, too."""
    for rank in (LOCAL, f"{LOCAL} {AGENT}", f"{ONE_EACH} {AGENT}"):
        assert detect_node(*node(f"{name} {rank}")) is None
    for rank in (RANK, f"{RANK} WORLD_SIZE=2 PET_NNODES="):  # what the platform means by itself
        assert detect_node(*node(f"{name} {rank} UNISONO_RANK_COUNTS=ranks")) is None


def test_a_world_size_in_ranks_beside_a_rank_in_nodes_is_no_rank() -> None:
    env, machine = node("kubeflow-pytorchjob.node1")
    match = "isn't PET_NNODES='2': it counts"
    with pytest.raises(EnvironmentDetectionError, match=match) as caught:
        detect(env)
    assert caught.value.variable == "WORLD_SIZE"
    assert "count nodes, by kubeflow" in str(meaning(env, machine))
    info = detect({**env, "WORLD_SIZE": "2"})
    assert info is not None
    assert (info.rank, info.world_size) == (1, 2)


@pytest.mark.parametrize("job", ["pbs", "sge"])
def test_as_many_ranks_as_hosts_are_no_nodes_where_only_the_first_is_started(job: str) -> None:
    words = f"{job}.node0 {BARE} RANK=0"
    assert (found(words).is_ambiguous, found(words).nnodes) == (True, 2)
    assert "AMBIGUOUS" in str(meaning(*node(words)))
    assert verdicts(*node(words)) == {job: "agrees"}
    asked = found(words, is_asked=True)
    assert (asked.source, asked.node_rank, asked.nnodes) == (job, 0, 2)
    assert found(f"{words} WORLD_SIZE=4", is_asked=True).is_ambiguous


def task(source: str, rank: int, size: int = 2, here: int = 1) -> str:
    """Give the variables of a launcher that has started so many tasks on each host."""
    local, at = rank % here, rank // here
    nodes = size // here
    return {
        "slurm": f"SLURM_STEP_ID=0 SLURM_JOB_ID=2 SLURM_STEP_NUM_TASKS={size} SLURM_NODEID={at} "
        f"SLURM_STEP_NUM_NODES={nodes} SLURM_PROCID={rank} SLURM_LOCALID={local} "
        f"SLURM_STEP_TASKS_PER_NODE={here}(x{nodes}) SLURM_STEP_NODELIST=n[1-{nodes}]",
        "openmpi": f"OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} "
        f"OMPI_COMM_WORLD_LOCAL_RANK={local} OMPI_COMM_WORLD_LOCAL_SIZE={here}",
        "pals": f"PALS_RANKID={rank} PMI_SIZE={size} PALS_LOCAL_RANKID={local} "
        f"PALS_LOCAL_SIZE={here} PALS_NODEID={at}",
        "flux": f"FLUX_TASK_RANK={rank} FLUX_JOB_SIZE={size} FLUX_TASK_LOCAL_ID={local} "
        f"FLUX_JOB_NNODES={nodes}",
    }[source]


LAUNCHERS = ("slurm", "openmpi", "pals", "flux")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_only_task_of_a_host_is_its_platform_s_node(launcher: str) -> None:
    for name in ("skypilot.node0", "skypilot.node1", "kubeflow.node1", "aws-batch.node1"):
        number = NODES[name].number
        words = f"{name} {task(launcher, number)}"
        rank = detect(node(words)[0])
        assert rank is not None and rank.source == launcher
        info = found(words)
        assert facts(info) == NODES[name].says
        assert verdicts(*node(words))[info.source] == "won"
        for other in (
            f"{task(launcher, number)} UNISONO_RANK_COUNTS=ranks",
            task(launcher, 1 - number),  # another place than the platform's
            task(launcher, number, size=4, here=2),
            task(launcher, number, here=2),
            f"{task(launcher, number)} TORCHELASTIC_RUN_ID=b5a7",
        ):
            assert detect_node(*node(f"{name} {other}")) is None


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", ["pbs.node0", "pbs.node1"])
def test_a_file_of_hosts_counts_for_the_only_task_of_each_where_asked(
    launcher: str, name: str
) -> None:
    words = f"{name} {task(launcher, NODES[name].number)}"
    assert detect_node(*node(words)) is None
    assert facts(found(words, is_asked=True)) == NODES[name].says


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_user_s_word_makes_tasks_nodes(launcher: str) -> None:
    unled = f"{task(launcher, 1)} UNISONO_RANK_COUNTS=nodes"
    words = f"{unled} MASTER_ADDR=c01"
    info = found(words)
    assert (info.source, info.node_rank, info.nnodes, info.max_nnodes) == ("stated", 1, 2, 2)
    assert (info.master_addr, info.nproc_per_node) == ("c01", None)
    assert verdicts(*node(words)) == {"stated": "won"}
    if launcher == "slurm":
        assert found(unled).master_addr == "n1"  # which Slurm says
    else:
        assert "MASTER_ADDR, the address of node 0" in str(refused(unled))
    for wrong in (task(launcher, 1, here=2), "RANK=3", "WORLD_SIZE=16"):
        error = refused(f"{words} {wrong}")
        refusal = f"UNISONO_RANK_COUNTS=nodes, but {launcher} reports rank 1 of 2"
        assert refusal in str(error)
        assert not is_gap(error, may_be_several=True)
        assert verdicts(*node(f"{words} {wrong}")) == {"stated": "refused"}
    one = found(f"{task(launcher, 0, size=1)} UNISONO_RANK_COUNTS=nodes")
    assert (one.node_rank, one.nnodes, one.master_addr) == (0, 1, None)


def test_a_node_with_fewer_tasks_than_others_is_not_the_only_one_of_each() -> None:
    last = f"{task('slurm', 3, size=4, here=2)} SLURM_LOCALID=0 SLURM_STEP_TASKS_PER_NODE=3,1"
    error = refused(f"{last} UNISONO_RANK_COUNTS=nodes")
    assert "rank 3 of 4, and not one rank on each node" in str(error)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_plain_ranks_are_no_nodes(launcher: str) -> None:
    for here in (1, 2):
        words = task(launcher, 1, here=here)
        assert detect_node(*node(words), is_asked=True) is None
        error = not_a_node("--nnodes auto", node(words)[0])
        assert error is not None
        assert "--nnodes auto: no platform" in str(error)
        assert f"{launcher} reports rank 1 of 2" in str(error)
        assert "set UNISONO_RANK_COUNTS=nodes" in str(error)
    for words in (f"{task(launcher, 1)} UNISONO_RANK_COUNTS=ranks", task(launcher, 0, size=1)):
        assert not_a_node("--nnodes auto", node(words)[0]) is None


def test_a_rank_of_torchrun_isn_t_told_a_word_that_would_change_nothing() -> None:
    said = str(not_a_node("--nnodes auto", node("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0")[0]))
    assert "torchrun reports rank 1 of 2" in said
    assert "UNISONO_RANK_COUNTS" not in said
    assert not_a_node("--nnodes auto", {"HOME": "/home/ada"}) is None


UNCOUNTED = [
    *("VC_TASK_INDEX=0", "TPU_WORKER_ID=0", "PBS_NODEFILE=/not/there", "PE_HOSTFILE=/not/there"),
    *("PET_NODE_RANK=0", "SM_CURRENT_HOST=algo-1"),
]
COUNTED = [
    *("AZUREML_NODE_COUNT=2", "JOB_COMPLETION_INDEX=0 PET_NNODES=2"),
    "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2",
]


@pytest.mark.parametrize("words", [*UNCOUNTED, *COUNTED])
def test_what_is_missing_is_known_from_what_contradicts(words: str) -> None:
    error = refused(words)
    assert is_gap(error, may_be_several=True)
    assert is_gap(error, may_be_several=False) == (words in UNCOUNTED)


@pytest.mark.parametrize(
    ("variable", "text", "count"),
    [
        ("PBS_NODEFILE", "c01|c02|c01|c02|", "2"),
        ("PBS_NODEFILE", "c01|c01|c02|", None),
        ("PE_HOSTFILE", "c01+3+a|c02+2+a|c02+1+b|", "3"),
        ("PE_HOSTFILE", "c01+3|c02+2|", None),
        ("PE_HOSTFILE", "c01|c02|", "1"),
    ],
)
def test_slots_are_the_ranks_of_a_host_where_all_have_as_many(
    variable: str, text: str, count: str | None
) -> None:
    info = found(f"{variable}={text}", "c02")
    assert (info.node_rank, info.nproc_per_node) == (1, count)
    assert info.hosts == ("c01", "c02")


def test_a_host_may_be_alone_and_has_a_number_of_slots() -> None:
    one = found("PBS_NODEFILE=c01|c01 MASTER_PORT=0", "login")  # an alias of c01
    assert (one.node_rank, one.nnodes, one.hosts) == (0, 1, ("c01",))
    error = refused("PE_HOSTFILE=c01+many|c02+2", "c02")
    assert "begin with a host and its slots" in str(error)


def test_an_elastic_pytorchjob_seats_its_pods_whatever_their_rank() -> None:
    words = f"pytorchjob.node1 {SEATED}"
    assert detect(node(words)[0]) is not None  # of as many pods as there are
    info = found(words)
    assert (info.source, info.node_rank, info.nnodes, info.max_nnodes) == ("kubeflow", None, 1, 4)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "294000"])
def test_the_port_beside_a_host_is_checked(port: str) -> None:
    unset = "PET_MASTER_ADDR= PET_MASTER_PORT="
    error = refused(f"kubeflow.node1 {unset} PET_RDZV_ENDPOINT=c01:{port}")
    assert (error.variable, error.value) == ("PET_RDZV_ENDPOINT", port)
    unset = "MASTER_PORT= MASTER_ADDR= RANK= WORLD_SIZE="
    error = refused(f"azureml.node1 {unset} AZ_BATCH_MASTER_NODE=10.0.0.4:{port}")
    assert error.variable == "AZ_BATCH_MASTER_NODE"


def test_explain_names_the_winner_and_its_variables() -> None:
    assert verdicts(*node("tpu.node1")) == {"tpu": "won"}
    assert verdicts(*node("tpu.node1 PET_NNODES=2"))["kubernetes"] == "agrees"
    findings = {each.source: each for each in explain_nodes(*node("skypilot.node1"))}
    assert set(dict(findings["skypilot"].variables)) >= {"SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"}
    odd = node("skypilot.node1 TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=a,b")
    assert verdicts(*odd) == {"skypilot": "won", "tpu": "disagrees"}
    partial = "SKYPILOT_NODE_RANK=1"
    assert verdicts(*node(partial)) == {"skypilot": "refused"}
    assert verdicts(*node(f"{partial} RANK=0 WORLD_SIZE=2 LOCAL_RANK=0")) == {"skypilot": "unused"}


def test_what_is_explained_is_what_decides_beside_a_plug_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An environment of somebody else's says that this is a rank, which no partial set spoils."""
    info = RankInfo(3, 4, 1, 2, source="own")
    own = SimpleNamespace(NAME="own", detect=lambda env: info if "OWN_RANK" in env else None)
    env, machine = node("SKYPILOT_NODE_RANK=1 OWN_RANK=3")
    assert detect_node(env, machine, [own]) is None
    assert verdicts(env, machine, own) == {"skypilot": "unused"}
    assert verdicts(env, machine) == {"skypilot": "refused"}
    monkeypatch.setattr(diagnosis, "environments", SimpleNamespace(load_plugins=lambda: (own,)))
    of_node = diagnosis.diagnose(env)["node"]
    assert (of_node["source"], of_node["error"]) == (None, None)


@pytest.mark.parametrize(("rank", "size"), [("3", "2"), ("x", "2"), ("0", "0")])
def test_what_can_t_be_a_rank_isn_t_said_to_count_ranks(rank: str, size: str) -> None:
    said = str(meaning(*node(f"RANK={rank} WORLD_SIZE={size}")))
    assert said.startswith(f"RANK={rank} and WORLD_SIZE={size} can't be used: torchrun")


NAMES = sorted({name for each in NODES.values() for name in each.env})
VALUES = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.integers(-2, 9).map(str)
    | st.text('n0123456789[]:,.x\n" ')
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(NODES)),
    st.dictionaries(st.sampled_from(NAMES) | st.just("VC_X_HOSTS"), VALUES, max_size=5),
)
def test_any_text_gives_facts_or_our_error(name: str, noise: dict[str, str]) -> None:
    env, machine = MappingProxyType({**NODES[name].env, **noise}), NODES[name].machine()
    explain_nodes(env, machine)
    try:
        info = detect_node(env, machine)
    except EnvironmentDetectionError as error:
        assert len(str(error)) < 1500
        return
    if info is not None:
        assert 1 <= info.nnodes <= info.max_nnodes
        assert info.node_rank is None or 0 <= info.node_rank < info.max_nnodes
        assert 1 <= info.master_port <= 65535
        assert info.is_ambiguous or (info.master_addr is None) == (info.max_nnodes == 1)
        assert info.nproc_per_node is None or re.fullmatch(
            r"[0-9]+|auto|gpu|cpu", info.nproc_per_node
        )
