"""Which node is this: dumps of platforms, sets that are partial or wrong, and what is ambiguous."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.platforms import JOBS, NODES, facts
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


def _missing(path: str) -> str:
    raise FileNotFoundError(path)


def with_file(host: str, text: str) -> Machine:
    """Give a machine whose every file has this text."""
    return Machine(lambda: host, lambda: "10.0.0.9", lambda path: text)


HERE_WITHOUT_FILES = Machine(lambda: "host", lambda: "10.0.0.9", _missing)
HERE = with_file("host", "host\nother\n")


def read(name: str, **changes: str | None) -> NodeInfo | None:
    """Ask about a dump, some of its variables changed or, where None, left out."""
    node = NODES[name]
    env = {key: value for key, value in {**node.env, **changes}.items() if value is not None}
    return detect_node(MappingProxyType(env), node.machine())


def found(name: str, **changes: str | None) -> NodeInfo:
    info = read(name, **changes)
    assert info is not None
    return info


def node_of(env: Mapping[str, str], machine: Machine, *, is_asked: bool = False) -> NodeInfo:
    info = detect_node(env, machine, is_asked=is_asked)
    assert info is not None
    return info


def rank_of(env: Mapping[str, str]) -> RankInfo:
    info = detect(env)
    assert info is not None
    return info


def refused(name: str, **changes: str | None) -> EnvironmentDetectionError:
    with pytest.raises(EnvironmentDetectionError) as caught:
        read(name, **changes)
    error = caught.value
    assert str(error).startswith(f"{error.source} environment: ")
    assert error.variable in str(error)
    assert "--nnodes 1" in str(error)  # the remedy that always helps
    return error


@pytest.mark.parametrize("name", NODES)
def test_dump(name: str) -> None:
    assert facts(found(name)) == NODES[name].says


@pytest.mark.parametrize("job", JOBS)
def test_both_nodes_of_a_job_agree(job: str) -> None:
    one, other = (found(f"{job}.node{number}") for number in (0, 1))
    assert (one.node_rank, other.node_rank) == (0, 1)
    assert one.nnodes == one.max_nnodes == other.nnodes == 2
    assert (one.master_addr, one.master_port) == (other.master_addr, other.master_port)
    assert (one.source, one.nproc_per_node) == (other.source, other.nproc_per_node)


def test_every_platform_has_a_dump_and_a_page() -> None:
    stated = {"stated"}  # no platform's, but the user's word
    assert {found(name).source for name in NODES} | stated == {each.NAME for each in PLATFORMS}
    assert len(PLATFORMS) >= 12
    for platform in PLATFORMS:
        assert platform.documentation.startswith("https://")


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
    error = refused(name, **dict.fromkeys(names))
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
    "aws-batch.node1": (
        "AWS_BATCH_JOB_NODE_INDEX=7; AWS_BATCH_JOB_MAIN_NODE_INDEX=7; AWS_BATCH_JOB_NUM_NODES=1"
    ),
    "sagemaker.node1": "SM_CURRENT_HOST=algo-3; SM_HOSTS=algo-1,algo-2; SM_HOSTS=[1, 2]",
    "azureml.node1": "NODE_RANK=2; AZUREML_NODE_COUNT=two",
    "pbs.node1": "PBS_NODEFILE=/not/there",
    "sge.node1": "PE_HOSTFILE=/not/there",
    "tpu.node1": "TPU_WORKER_ID=2",
}
NO_RANK = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"))
# Where another variable is at fault by what was changed, which is named as well.
NAMED = {
    ("aws-batch.node1", "AWS_BATCH_JOB_NUM_NODES"): "AWS_BATCH_JOB_NODE_INDEX",
    ("pytorchjob.node1", "WORLD_SIZE"): "RANK",
}


@pytest.mark.parametrize(("name", "case"), cases(WRONG))
def test_a_wrong_variable_is_refused_by_name(name: str, case: str) -> None:
    variable, _, value = case.partition("=")
    beside = NO_RANK if name.startswith("azureml") else {}  # else it is a rank all the same
    error = refused(name, **{**beside, variable: value})
    assert is_gap(error, may_be_several=True) == (error.source in ("pbs", "sge"))
    expected = NAMED.get((name, variable), variable)
    assert error.variable == expected
    assert expected in str(error)
    assert expected != variable or value.strip() in str(error)


def test_several_slices_are_told_what_counts_the_hosts_of_all() -> None:
    error = refused("tpu.node1", MEGASCALE_NUM_SLICES="2")
    assert (error.source, error.variable, error.value) == ("tpu", "PET_NODE_RANK", None)
    assert "MEGASCALE_NUM_SLICES=2, and TPU_WORKER_ID counts the hosts of one slice" in str(error)
    assert "set PET_NODE_RANK, PET_NNODES and PET_MASTER_ADDR" in str(error)
    assert "set TPU_WORKER_ID" not in str(error)
    assert is_gap(error, may_be_several=True)  # a bare Parallel() warns, and goes on alone
    assert not is_gap(error, may_be_several=False)
    numbered = {"PET_NODE_RANK": "3", "PET_NNODES": "4", "PET_MASTER_ADDR": "tpu-0"}
    info = found("tpu.node1", MEGASCALE_NUM_SLICES="2", **numbered)
    assert (info.node_rank, info.nnodes, info.master_addr) == (3, 4, "tpu-0")


def test_a_node_that_isn_t_in_the_list_is_refused() -> None:
    node = NODES["pbs.node1"]
    elsewhere = Machine(lambda: "login.cluster", node.machine().address, node.machine().read)
    with pytest.raises(EnvironmentDetectionError, match=r"'login.cluster', isn't one host of PBS"):
        detect_node(node.env, elsewhere)


def test_two_tasks_of_volcano_are_not_numbered_by_guess() -> None:
    error = refused("volcano.node1", VC_PS_HOSTS="train-ps-0.train", VC_PS_NUM="1")
    assert "VC_PS_HOSTS and VC_WORKER_HOSTS are lists" in str(error)
    assert "pytorch" in str(error)


def test_a_pod_without_a_service_is_told_what_is_missing() -> None:
    node = NODES["kubernetes.node1"]
    for name, said in (("train-1", "headless Service"), ("web.train.svc", "doesn't end so")):
        machine = Machine(lambda name=name: name, node.machine().address, node.machine().read)  # type: ignore[misc]
        with pytest.raises(EnvironmentDetectionError, match=said) as caught:
            detect_node(node.env, machine)
        assert caught.value.variable == "MASTER_ADDR"
        info = node_of({**node.env, "MASTER_ADDR": "train-0.train"}, machine)
        assert info.master_addr == "train-0.train"


def test_the_main_node_of_aws_batch_leads_whatever_its_index() -> None:
    job = {"AWS_BATCH_JOB_NUM_NODES": "4", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2"}
    nodes = [found("aws-batch.node1", **job, AWS_BATCH_JOB_NODE_INDEX=index) for index in "0123"]
    assert [info.node_rank for info in nodes] == [1, 2, 0, 3]


def test_an_elastic_job_seats_itself() -> None:
    unset = dict.fromkeys(("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"))
    seats = {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "train-worker-0:23456"}
    info = found("kubeflow.node1", **unset, **seats)
    assert (info.node_rank, info.nnodes, info.max_nnodes) == (None, 1, 4)
    assert (info.master_addr, info.master_port) == ("train-worker-0", 23456)


def test_what_kubeflow_says_besides() -> None:
    assert found("kubeflow-elastic.node1").max_restarts == 3
    assert found("kubeflow.node1").max_restarts is None
    for way in ("c10d", "static", " "):
        assert facts(found("kubeflow.node1", PET_RDZV_BACKEND=way)) == NODES["kubeflow.node1"].says
    assert found("kubeflow.node1", PET_NNODES="1", PET_NODE_RANK="0", PET_RDZV_BACKEND="etcd")


@pytest.mark.parametrize("node", [0, 1])
def test_an_elastic_indexed_job_knows_its_first_pod_in_each(node: int) -> None:
    info = found(f"kubernetes.node{node}", PET_NNODES="1:4")
    assert (info.node_rank, info.nnodes, info.max_nnodes) == (None, 1, 4)
    assert info.master_addr == found("kubernetes.node0").master_addr


def test_one_node_needs_no_leader() -> None:
    for name, changes in (
        ("kubernetes.node0", {"PET_NNODES": "1"}),
        ("skypilot.node0", {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"}),
        ("sagemaker.node0", {"SM_HOSTS": '["algo-1"]'}),
    ):
        info = found(name, **changes)
        assert (info.node_rank, info.nnodes, info.master_addr) == (0, 1, None)


def test_no_accelerator_leaves_the_count_open() -> None:
    assert found("skypilot.node0", SKYPILOT_NUM_GPUS_PER_NODE="0").nproc_per_node is None
    assert found("kubeflow.node0", PET_NPROC_PER_NODE="auto").nproc_per_node == "auto"


def test_address_and_port_from_the_user_come_first() -> None:
    for job in ("skypilot", "aws-batch", "sagemaker", "pbs", "sge", "tpu", "kubernetes"):
        info = found(f"{job}.node1", MASTER_ADDR="fd00::7", MASTER_PORT="4711")
        assert (info.master_addr, info.master_port) == ("fd00::7", 4711)


BARE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "c01"}


def test_rank_and_world_size_alone_are_ambiguous() -> None:
    info = node_of(BARE, HERE)
    assert info.is_ambiguous
    error = ambiguity(info)
    assert error.variable == "RANK"
    for remedy in ("UNISONO_RANK_COUNTS=nodes", "UNISONO_RANK_COUNTS=ranks", "--nnodes"):
        assert remedy in str(error)
    assert "AMBIGUOUS" in str(meaning(BARE, HERE))
    stated = node_of({**BARE, "UNISONO_RANK_COUNTS": "nodes"}, HERE)
    assert (stated.node_rank, stated.nnodes, stated.is_ambiguous) == (1, 2, False)
    assert detect({**BARE, "UNISONO_RANK_COUNTS": "nodes"}) is None
    assert detect_node({**BARE, "UNISONO_RANK_COUNTS": "ranks"}, HERE) is None
    assert meaning({**BARE, "UNISONO_RANK_COUNTS": "ranks"}, HERE) == (
        "RANK=1 and WORLD_SIZE=2 count ranks"
    )
    for ask in (lambda env: detect_node(env, HERE), detect):
        with pytest.raises(
            EnvironmentDetectionError, match=r"UNISONO_RANK_COUNTS='pods' should be"
        ):
            ask({**BARE, "UNISONO_RANK_COUNTS": "pods"})


@pytest.mark.parametrize(
    "changes",
    [
        {"LOCAL_RANK": "0"},
        {"GROUP_RANK": "1"},
        {"LOCAL_WORLD_SIZE": "1"},
        {"TORCHELASTIC_RUN_ID": "b5a7"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_what_tells_a_rank_leaves_no_doubt(changes: dict[str, str]) -> None:
    assert detect_node({**BARE, **changes}, HERE) is None


def test_a_pod_s_name_is_needed_for_what_its_rank_counts() -> None:
    for changes in (
        {"HOSTNAME": None},
        {"HOSTNAME": "other-worker-0"},
        {"HOSTNAME": "digits-worker-4"},
        {"MASTER_ADDR": "c01"},
    ):
        assert found("pytorchjob.node1", **changes).is_ambiguous, changes


def test_a_loopback_address_is_a_master_s_alone() -> None:
    """The master itself is told so; elsewhere the same may be what somebody set by hand."""
    name = "pytorchjob-operator.node0"
    assert found(name, MASTER_ADDR="127.0.0.1").master_addr == "digits-master-0"
    for changes in (
        {"HOSTNAME": "digits-worker-0"},
        {"HOSTNAME": "digits-master-1"},
        {"HOSTNAME": "c01"},
        {"RANK": "1"},
        {"MASTER_ADDR": "127.0.0.2"},
    ):
        assert found(name, **changes).is_ambiguous, changes


@pytest.mark.parametrize("name", NODES)
def test_a_rank_on_a_platform_is_no_node(name: str) -> None:
    """What `unisono run` and torchrun start there has the platform's variables, too."""
    rank = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    agent = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert read(name, **rank) is None
    assert read(name, **rank, **agent) is None
    one_each = {**rank, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read(name, **one_each, **agent) is None


def test_azure_s_only_rank_of_a_node_may_start_more() -> None:
    assert found("azureml.node1").source == "azureml"
    assert read("azureml.node1", LOCAL_RANK="1") is None
    assert found("azureml.node1", LOCAL_RANK=None).source == "azureml"
    assert read("azureml.node1", LOCAL_RANK="0", WORLD_SIZE="4", RANK="2") is None


def test_a_world_size_in_ranks_beside_a_rank_in_nodes_is_no_rank() -> None:
    node = NODES["kubeflow-pytorchjob.node1"]
    with pytest.raises(
        EnvironmentDetectionError, match="isn't PET_NNODES='2': it counts"
    ) as caught:
        detect(node.env)
    assert caught.value.variable == "WORLD_SIZE"
    assert "count nodes, by kubeflow" in str(meaning(node.env, node.machine()))
    same = {**node.env, "WORLD_SIZE": "2"}
    info = rank_of(same)
    assert (info.rank, info.world_size) == (1, 2)


RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "c01", "MASTER_PORT": "4711"}


@pytest.mark.parametrize(
    "others",
    [
        {"JOB_COMPLETION_INDEX": "1"},
        {"JOB_COMPLETION_INDEX": "1", "PET_NNODES": "many"},
        {"PBS_NODEFILE": "/not/there"},
        {"SKYPILOT_NODE_RANK": "1"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "4"},
        {"AZUREML_NODE_COUNT": "2"},
    ],
)
def test_a_rank_stays_a_rank_beside_a_platform_that_says_something_else(
    others: dict[str, str],
) -> None:
    info = node_of({**RANK, **others}, HERE_WITHOUT_FILES)
    assert info.is_ambiguous  # which Parallel takes for a rank, and `unisono run` refuses
    assert detect_node({**RANK, **others, "UNISONO_RANK_COUNTS": "ranks"}, HERE) is None


def test_a_file_of_one_host_says_nothing_of_ranks_that_were_started_by_hand() -> None:
    info = node_of({**RANK, "PBS_NODEFILE": "/nodes"}, with_file("c01", "c01\n"))
    assert (info.is_ambiguous, info.nnodes) == (True, 4)


@pytest.mark.parametrize("job", ["pbs", "sge"])
def test_as_many_ranks_as_hosts_are_no_nodes_where_only_the_first_is_started(job: str) -> None:
    node = NODES[f"{job}.node0"]
    env = {**node.env, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "c01"}
    info = node_of(env, node.machine())
    assert (info.is_ambiguous, info.nnodes) == (True, 2)
    assert "AMBIGUOUS" in str(meaning(env, node.machine()))
    assert verdicts(env, node.machine()) == {job: "agrees"}
    asked = node_of(env, node.machine(), is_asked=True)
    assert (asked.source, asked.node_rank, asked.nnodes) == (job, 0, 2)
    odd = node_of({**env, "WORLD_SIZE": "4"}, node.machine(), is_asked=True)
    assert odd.is_ambiguous


def test_a_rank_of_another_launcher_is_no_node() -> None:
    aprun = {"ALPS_APP_PE": "1", "PMI_SIZE": "4", "PBS_NODEFILE": "/not/there"}
    rank = rank_of(aprun)
    assert (rank.source, rank.local_rank) == ("cray", None)
    assert detect_node(aprun, HERE_WITHOUT_FILES) is None
    assert detect_node({**aprun, "SKYPILOT_NODE_RANK": "1"}, HERE) is None


def task(source: str, rank: int, size: int = 2, here: int = 1) -> dict[str, str]:
    """Give the variables of a launcher that has started so many tasks on each host."""
    local, node = rank % here, rank // here
    nodes = size // here
    of = {
        "slurm": f"SLURM_STEP_ID=0 SLURM_JOB_ID=2 SLURM_STEP_NUM_TASKS={size} SLURM_NODEID={node} "
        f"SLURM_STEP_NUM_NODES={nodes} SLURM_PROCID={rank} SLURM_LOCALID={local} "
        f"SLURM_STEP_TASKS_PER_NODE={here}(x{nodes}) SLURM_STEP_NODELIST=n[1-{nodes}]",
        "openmpi": f"OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} "
        f"OMPI_COMM_WORLD_LOCAL_RANK={local} OMPI_COMM_WORLD_LOCAL_SIZE={here}",
        "pals": f"PALS_RANKID={rank} PMI_SIZE={size} PALS_LOCAL_RANKID={local} "
        f"PALS_LOCAL_SIZE={here} PALS_NODEID={node}",
        "flux": f"FLUX_TASK_RANK={rank} FLUX_JOB_SIZE={size} FLUX_TASK_LOCAL_ID={local} "
        f"FLUX_JOB_NNODES={nodes}",
    }
    return dict(pair.split("=") for pair in of[source].split())


LAUNCHERS = ("slurm", "openmpi", "pals", "flux")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_only_task_of_a_host_is_its_platform_s_node(launcher: str) -> None:
    for name in ("skypilot.node0", "skypilot.node1", "kubeflow.node1", "aws-batch.node1"):
        node = NODES[name]
        env = {**node.env, **task(launcher, node.number)}
        found = detect(env)
        assert found is not None and found.source == launcher
        info = node_of(env, node.machine())
        assert facts(info) == node.says
        assert verdicts(env, node.machine())[info.source] == "won"
        assert detect_node({**env, "UNISONO_RANK_COUNTS": "ranks"}, node.machine()) is None
        for other in (
            task(launcher, 1 - node.number),  # another place than the platform's
            task(launcher, node.number, size=4, here=2),
            task(launcher, node.number, here=2),
            {**task(launcher, node.number), "TORCHELASTIC_RUN_ID": "b5a7"},
        ):
            assert detect_node({**node.env, **other}, node.machine()) is None


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", ["pbs.node0", "pbs.node1"])
def test_a_file_of_hosts_counts_for_the_only_task_of_each_where_asked(
    launcher: str, name: str
) -> None:
    node = NODES[name]
    env = {**node.env, **task(launcher, node.number)}
    assert detect_node(env, node.machine()) is None
    info = node_of(env, node.machine(), is_asked=True)
    assert facts(info) == node.says


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_user_s_word_makes_tasks_nodes(launcher: str) -> None:
    env = {**task(launcher, 1), "UNISONO_RANK_COUNTS": "nodes"}
    info = node_of({**env, "MASTER_ADDR": "c01"}, HERE)
    assert (info.source, info.node_rank, info.nnodes, info.max_nnodes) == ("stated", 1, 2, 2)
    assert (info.master_addr, info.nproc_per_node) == ("c01", None)
    assert verdicts({**env, "MASTER_ADDR": "c01"}, HERE) == {"stated": "won"}
    if launcher == "slurm":
        ours = node_of(env, HERE)
        assert ours.master_addr == "n1"  # which Slurm says
    else:
        with pytest.raises(EnvironmentDetectionError, match="MASTER_ADDR, which says where"):
            detect_node(env, HERE)
    for wrong in (task(launcher, 1, here=2), {"RANK": "3"}, {"WORLD_SIZE": "16"}):
        refusal = f"UNISONO_RANK_COUNTS=nodes, but {launcher} says that this is rank 1 of 2"
        with pytest.raises(EnvironmentDetectionError, match=refusal) as caught:
            detect_node({**env, "MASTER_ADDR": "c01", **wrong}, HERE)
        assert not is_gap(caught.value, may_be_several=True)
        assert verdicts({**env, "MASTER_ADDR": "c01", **wrong}, HERE) == {"stated": "refused"}
    alone = {**task(launcher, 0, size=1), "UNISONO_RANK_COUNTS": "nodes"}
    one = node_of(alone, HERE)
    assert (one.node_rank, one.nnodes, one.master_addr) == (0, 1, None)


def test_a_node_with_fewer_tasks_than_others_is_not_the_only_one_of_each() -> None:
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_STEP_NUM_NODES": "2"}
    last = {**task("slurm", 3, size=4, here=2), "SLURM_LOCALID": "0", **uneven}
    with pytest.raises(EnvironmentDetectionError, match="rank 3 of 4, and not that each node"):
        detect_node({**last, "UNISONO_RANK_COUNTS": "nodes"}, HERE)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_plain_ranks_are_no_nodes(launcher: str) -> None:
    for here in (1, 2):
        assert detect_node(task(launcher, 1, here=here), HERE, is_asked=True) is None
        error = not_a_node("--nnodes auto", task(launcher, 1, here=here))
        assert error is not None
        assert "--nnodes auto finds no platform" in str(error)
        assert f"{launcher} says that it is rank 1 of 2" in str(error)
        assert "set UNISONO_RANK_COUNTS=nodes" in str(error)
    torch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    said = str(not_a_node("--nnodes auto", torch))
    assert "torchrun says that it is rank 1 of 2" in said
    assert "UNISONO_RANK_COUNTS" not in said  # which would change nothing
    ranks = {**task(launcher, 1), "UNISONO_RANK_COUNTS": "ranks"}
    assert not_a_node("--nnodes auto", ranks) is None
    assert not_a_node("--nnodes auto", task(launcher, 0, size=1)) is None
    assert not_a_node("--nnodes auto", {"HOME": "/home/ada"}) is None


@pytest.mark.parametrize("name", NODES)
def test_the_user_s_word_for_ranks_comes_before_every_platform(name: str) -> None:
    assert read(name, **RANK, UNISONO_RANK_COUNTS="ranks") is None
    size = {"RANK": "1", "WORLD_SIZE": "2"}  # what the platform means by itself
    assert read(name, **RANK | size, PET_NNODES=None, UNISONO_RANK_COUNTS="ranks") is None
    if name == "azureml.node1":
        assert read(name, UNISONO_RANK_COUNTS="ranks") is None


def test_what_a_job_of_one_node_may_have_is_no_reason_to_refuse() -> None:
    assert detect_node({"JOB_COMPLETION_INDEX": "3"}, HERE) is None
    sweep = node_of({"JOB_COMPLETION_INDEX": "3", "PET_NNODES": "1"}, HERE)
    assert (sweep.node_rank, sweep.nnodes) == (0, 1)
    alias = with_file("login", "c01\nc01\n")
    one_host = node_of({"PBS_NODEFILE": "/nodes", "MASTER_PORT": "0"}, alias)
    assert (one_host.node_rank, one_host.nnodes, one_host.hosts) == (0, 1, ("c01",))


UNCOUNTED = [
    {"VC_TASK_INDEX": "0"},
    {"TPU_WORKER_ID": "0"},
    {"PBS_NODEFILE": "/not/there"},
    {"PE_HOSTFILE": "/not/there"},
    {"PET_NODE_RANK": "0"},
    {"SM_CURRENT_HOST": "algo-1"},
]
COUNTED = [
    {"AZUREML_NODE_COUNT": "2"},
    {"JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2"},
    {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
]


@pytest.mark.parametrize("env", [*UNCOUNTED, *COUNTED])
def test_what_is_missing_is_known_from_what_contradicts(env: dict[str, str]) -> None:
    with pytest.raises(EnvironmentDetectionError) as caught:
        detect_node(env, HERE_WITHOUT_FILES)
    assert is_gap(caught.value, may_be_several=True)
    assert is_gap(caught.value, may_be_several=False) == (env in UNCOUNTED)


@pytest.mark.parametrize(
    ("variable", "text", "count"),
    [
        ("PBS_NODEFILE", "c01\nc02\nc01\nc02\n", "2"),
        ("PBS_NODEFILE", "c01\nc01\nc02\n", None),
        ("PE_HOSTFILE", "c01 3 a\nc02 2 a\nc02 1 b\n", "3"),
        ("PE_HOSTFILE", "c01 3\nc02 2\n", None),
    ],
)
def test_slots_are_the_ranks_of_a_host_where_all_have_as_many(
    variable: str, text: str, count: str | None
) -> None:
    info = node_of({variable: "/hosts"}, with_file("c02", text))
    assert (info.node_rank, info.nproc_per_node) == (1, count)
    assert info.hosts == ("c01", "c02")


def test_a_host_without_a_number_of_slots_is_refused() -> None:
    with pytest.raises(EnvironmentDetectionError, match="begin with a host and its slots"):
        detect_node({"PE_HOSTFILE": "/hosts"}, with_file("c02", "c01 many\nc02 2\n"))


def test_nodes_of_a_fixed_number_may_seat_themselves() -> None:
    seats = {"PET_RDZV_ENDPOINT": "c01:23456", "PET_NNODES": "2", "MASTER_PORT": "4711"}
    info = node_of(seats, HERE)
    assert (info.node_rank, info.nnodes, info.max_nnodes) == (None, 2, 2)
    assert (info.master_addr, info.master_port) == ("c01", 23456)  # torchrun's own
    fixed = found("kubeflow.node1", PET_NNODES="2:2")
    assert (fixed.node_rank, fixed.nnodes, fixed.max_nnodes) == (1, 2, 2)


def test_an_elastic_pytorchjob_seats_its_pods_whatever_their_rank() -> None:
    job = NODES["pytorchjob.node1"]
    elastic = {**job.env, "PET_RDZV_ENDPOINT": "digits-worker-0:23456", "PET_NNODES": "1:4"}
    assert detect(elastic) is not None  # a RANK and a WORLD_SIZE of as many pods as there are
    info = node_of(elastic, job.machine())
    assert (info.source, info.node_rank, info.nnodes, info.max_nnodes) == ("kubeflow", None, 1, 4)
    more = node_of({**elastic, "WORLD_SIZE": "8", "HOSTNAME": "c01"}, job.machine())
    assert more.is_ambiguous


def test_torchrun_s_names_come_before_the_general_ones() -> None:
    general = {"MASTER_ADDR": "c07", "MASTER_PORT": "4711"}
    for name in ("kubeflow.node1", "kubernetes.node1"):
        info = found(name, **general, PET_MASTER_ADDR="c01", PET_MASTER_PORT=None)
        assert (info.master_addr, info.master_port) == ("c01", 4711)
        info = found(name, **general, PET_MASTER_ADDR="c01", PET_MASTER_PORT="29400")
        assert (info.master_addr, info.master_port) == ("c01", 29400)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "294000"])
def test_the_port_beside_a_host_is_checked(port: str) -> None:
    unset = dict.fromkeys(("PET_MASTER_ADDR", "PET_MASTER_PORT"))
    error = refused("kubeflow.node1", **unset, PET_RDZV_ENDPOINT=f"c01:{port}")
    assert (error.variable, error.value) == ("PET_RDZV_ENDPOINT", port)
    unset = dict.fromkeys(("MASTER_PORT", "MASTER_ADDR", "RANK", "WORLD_SIZE"))
    error = refused("azureml.node1", **unset, AZ_BATCH_MASTER_NODE=f"10.0.0.4:{port}")
    assert error.variable == "AZ_BATCH_MASTER_NODE"


def verdicts(env: Mapping[str, str], machine: Machine) -> dict[str, str]:
    findings = explain_nodes(env, machine)
    assert [each.source for each in findings] == [each.NAME for each in PLATFORMS]
    return {each.source: each.verdict for each in findings if each.verdict != "absent"}


def test_explain_names_the_winner_and_its_variables() -> None:
    tpu = NODES["tpu.node1"]
    assert verdicts(tpu.env, tpu.machine()) == {"tpu": "won"}
    both = {**tpu.env, "PET_NNODES": "2"}
    assert verdicts(both, tpu.machine())["kubernetes"] == "agrees"
    sky = NODES["skypilot.node1"]
    findings = {each.source: each for each in explain_nodes(sky.env, sky.machine())}
    assert set(dict(findings["skypilot"].variables)) >= {"SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"}
    odd = {**sky.env, "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}
    assert verdicts(odd, sky.machine()) == {"skypilot": "won", "tpu": "disagrees"}
    partial = {"SKYPILOT_NODE_RANK": "1"}
    assert verdicts(partial, HERE) == {"skypilot": "refused"}
    in_a_rank = {**partial, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert verdicts(in_a_rank, HERE) == {"skypilot": "unused"}


def test_what_is_explained_is_what_decides_beside_a_plug_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An environment of somebody else's says that this is a rank, which no partial set spoils."""
    info = RankInfo(3, 4, 1, 2, source="own")
    own = SimpleNamespace(NAME="own", detect=lambda env: info if "OWN_RANK" in env else None)
    env = {"SKYPILOT_NODE_RANK": "1", "OWN_RANK": "3"}
    assert detect_node(env, HERE, [own]) is None
    assert {each.verdict for each in explain_nodes(env, HERE, [own])} == {"unused", "absent"}
    assert {each.verdict for each in explain_nodes(env, HERE)} == {"refused", "absent"}
    monkeypatch.setattr(diagnosis, "environments", SimpleNamespace(load_plugins=lambda: (own,)))
    node = diagnosis.diagnose(env)["node"]
    assert (node["source"], node["error"]) == (None, None)


@pytest.mark.parametrize(("rank", "size"), [("3", "2"), ("x", "2"), ("0", "0")])
def test_what_can_t_be_a_rank_isn_t_said_to_count_ranks(rank: str, size: str) -> None:
    said = str(meaning({"RANK": rank, "WORLD_SIZE": size}, HERE))
    assert said.startswith(f"RANK={rank} and WORLD_SIZE={size} can't be those of a rank: torchrun")


NAMES = sorted({name for node in NODES.values() for name in node.env})
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
    node = NODES[name]
    env = MappingProxyType({**node.env, **noise})
    explain_nodes(env, node.machine())
    try:
        info = detect_node(env, node.machine())
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
