"""``Parallel`` on a platform's node; that nodes meet is tested where there are two hosts."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.support.platforms import NODES
from tests.support.processes import python
from unisono.environments.platforms import PORT
from unisono.errors import ArgumentError, ContextError, EnvironmentDetectionError
from unisono.lifecycle import _warn_on_a_node
from unisono.parallel import _ranks_to_start
from unisono.topology import NodeInfo

ONLY_TASK = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items()
}


AUTO: dict[str, Any] = {"nproc_per_node": 1, "nnodes": "auto"}
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2"}
ELASTIC = {**RANK_1, "PET_RDZV_ENDPOINT": "digits-worker-0:23456", "PET_NNODES": "1:4"}
SEATS = "agree on their node ranks.*start the script with unisono run"


def on(monkeypatch: pytest.MonkeyPatch, name: str = "", **changes: str) -> None:
    for variable, value in {**(NODES[name].env if name else {}), **changes}.items():
        monkeypatch.setenv(variable, value)


@pytest.fixture
def sge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job of two hosts, of which this is the first."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{socket.gethostname()} 1 a\nc02 1 a\n")
    monkeypatch.setenv("PE_HOSTFILE", str(hosts))


def refuse(error: type[Exception], text: str, backend: str | None = "gloo", **options: Any) -> None:
    """Demand that such a block doesn't begin."""
    with pytest.raises(error, match=text):
        unisono.Parallel(backend, **options).__enter__()


def is_alone(backend: str | None, **options: Any) -> None:
    """Demand that such a block is one rank."""
    with unisono.Parallel(backend, **options) as parallel:
        assert parallel.run(own_rank) == [0]
        assert unisono.get_world_size() == 1
        assert backend is not None or unisono.model_name() == "serial"


def own_rank(local_rank: int) -> int:
    return unisono.get_rank()


@pytest.mark.parametrize(
    ("name", "changes", "options", "says"),
    [
        ("skypilot", {}, {}, "skypilot: 2 processes here, node 0 is 10.0.0.1"),
        ("skypilot", {}, {"nproc_per_node": 3, "master_port": 4711}, "skypilot: 3 processes"),
        # The only task of a host is a node where the program says so.
        ("skypilot", ONLY_TASK, {"nnodes": "auto"}, "skypilot: 2 processes"),
        ("skypilot", ONLY_TASK, {"nproc_per_node": 2}, "skypilot: 2 processes"),
        # A RANK that counts nodes is one rank on each of them without `nnodes`.
        ("pytorchjob", {}, {"nnodes": "auto"}, "pytorchjob: {} processes"),
        ("pai", {}, {"nnodes": "auto"}, "pai: {} processes"),
        ("volcano-pytorch", {}, {"nnodes": "auto"}, "volcano: {} processes"),
        ("azureml", {}, {"nnodes": "auto"}, "azureml: {} processes"),
    ],
)
def test_it_says_which_node_it_takes_this_for(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    changes: dict[str, str],
    options: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.setattr("unisono.accelerators.accelerator_count", lambda: 0)
    monkeypatch.setattr("unisono.node.usable_cores", lambda: 3)
    on(monkeypatch, f"{name}.node1", **changes)
    caplog.set_level(logging.INFO, "unisono.parallel")
    with unisono.Parallel("gloo", **options):
        pass
    count = NODES[f"{name}.node1"].env.get("NPROC_PER_NODE", "3")
    assert f"node 1 of 2, according to {says.format(count)}" in caplog.text


def test_what_the_program_says_comes_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "unisono.parallel")
    on(monkeypatch, SKYPILOT_NODE_RANK="1")  # partial, and would be refused
    with unisono.Parallel("gloo", nproc_per_node=1, nnodes=1):
        pass
    with unisono.Parallel("threads", nproc_per_node=2) as parallel:
        assert parallel.run(own_rank) == [0, 1]
    assert f"spawn {__name__}.own_rank in 2 ranks" in caplog.text
    with (
        pytest.warns(UserWarning, match="continues alone: .*SKYPILOT_NUM_NODES") as caught,
        unisono.Parallel("gloo", nproc_per_node=1),
    ):
        pass
    assert caught[0].filename == __file__
    refuse(EnvironmentDetectionError, "SKYPILOT_NUM_NODES", nnodes="auto")
    assert "according to" not in caplog.text


LOGS = """
import logging, unisono

def say():
    with unisono.Parallel("serial") as parallel:
        parallel.run(print)

say()
logging.basicConfig(format="mine %(levelname)s", level="INFO")
say()
"""


def test_once_a_program_has_set_up_logging_that_alone_shows_what_parallel_says() -> None:
    lines = python("-c", LOGS).stderr.splitlines()
    assert ["INFO: run builtins.print in 1 rank" in line for line in lines].count(True) == 1
    assert lines[len(lines) // 2 :] == ["mine INFO"] * (len(lines) // 2), lines


@pytest.mark.usefixtures("sge")
@pytest.mark.parametrize("nproc_per_node", [None, 1])
def test_a_job_of_several_hosts_goes_on_alone_where_only_the_first_is_started(
    caplog: pytest.LogCaptureFixture, nproc_per_node: int | None
) -> None:
    caplog.set_level(logging.INFO, "unisono.parallel")
    with (
        pytest.warns(UserWarning, match=r"sge gives the job 2 hosts .*, c02\)") as caught,
        unisono.Parallel("gloo", nproc_per_node=nproc_per_node),
    ):
        assert unisono.get_world_size() == 1
    assert len(caught) == 1
    assert 'nnodes="auto"' in str(caught[0].message)
    with unisono.Parallel("gloo", nproc_per_node=1, nnodes="auto"):
        pass
    assert "node 0 of 2, according to sge: 1 processes here" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nnodes": 2}, "nnodes need nproc_per_node"),
        ({**AUTO, "launcher": "mpi"}, "not for the launcher 'mpi'"),
        ({**AUTO, "backend": "threads"}, "not for the backend 'threads'"),
        ({**AUTO, "node_rank": 0}, "'auto' does not support node_rank=: it detects"),
        ({**AUTO, "init_method": "env://"}, "'auto' does not support init_method=: it detects"),
        (
            {"nnodes": "auto", "rank": 0, "world_size": 2},
            "'auto' does not support rank=, world_size=: it",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        unisono.Parallel(**{"backend": "gloo", **options})


@pytest.mark.parametrize("job", ["skypilot", "pytorchjob", "pai", "volcano-pytorch", "azureml"])
def test_one_node_alone_can_be_said_without_a_count(
    monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    """Where RANK counts nodes, too. Ranks that are threads are no nodes anyway."""
    on(monkeypatch, f"{job}.node1")
    is_alone("gloo", nnodes=1, timeout=1)
    is_alone(None, nnodes=1)
    with unisono.Parallel("threads", nproc_per_node=2) as parallel:
        assert parallel.run(own_rank) == [0, 1]


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ranks wait at a port where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = str(bound.getsockname()[1])
        on(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        yield


@pytest.mark.parametrize(
    ("node", "variables", "options", "error", "text"),
    [
        ("", ONLY_TASK, AUTO, EnvironmentDetectionError, "openmpi reports rank 1 of 2"),
        ("", RANK_1, AUTO, EnvironmentDetectionError, "whether they count nodes"),
        ("kubeflow.node1", {"PET_NNODES": "1:4"}, {}, ArgumentError, SEATS),
        # An elastic PyTorchJob with a master.
        ("", ELASTIC, {}, ArgumentError, SEATS),
        ("", {**ELASTIC, "PET_NPROC_PER_NODE": "1"}, {}, ArgumentError, SEATS),
        ("", {**ELASTIC, "PET_NPROC_PER_NODE": "auto"}, {}, ArgumentError, SEATS),
    ],
)
def test_what_is_no_node_of_several_is_refused_unless_it_is_one(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    node: str,
    variables: dict[str, str],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.setattr("unisono.node.usable_cores", lambda: 1)
    if variables.items() >= ELASTIC.items():
        request.getfixturevalue("nobody")
    on(monkeypatch, node, **variables)
    refuse(error, text, timeout=0.5, **options)
    if options:
        with unisono.Parallel("gloo", **{**options, "nnodes": 1}):
            pass
    else:
        is_alone("gloo", nnodes=1)


@pytest.mark.usefixtures("nobody")
@pytest.mark.parametrize(
    ("nnodes", "more"),
    [
        (None, {}),
        (1, {}),
        # Its number may be the node's by chance, and another rank's of the job is not.
        (1, {"LOCAL_RANK": "1", "NODE_RANK": "1", "AZUREML_NODE_COUNT": "2"}),
    ],
)
def test_a_rank_that_nothing_explains_stays_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nnodes: int | None, more: dict[str, str]
) -> None:
    """Beside as many hosts, too, of which only the first is started: there is no warning."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"c01\n{socket.gethostname()}\n")
    on(monkeypatch, **RANK_1, **(more or {"PBS_NODEFILE": str(hosts)}))
    refuse(ContextError, "rank 1", nnodes=nnodes, timeout=0.5)


@pytest.mark.parametrize("missing", [True, False])
@pytest.mark.parametrize(
    ("env", "refused"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 "),
    ],
)
def test_a_gap_does_not_excuse_a_wrong_rank(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    env: dict[str, str],
    refused: str,
    missing: bool,
) -> None:
    hosts = tmp_path / "hosts"
    if not missing:
        hosts.write_text(f"{socket.gethostname()}\nc02\n")
    on(monkeypatch, PBS_NODEFILE=str(hosts), **env)
    for backend in ("gloo", None):
        refuse(EnvironmentDetectionError, refused, backend)  # and no warning
        is_alone(backend, nnodes=1)


@pytest.mark.parametrize("platform", ["skypilot", "sge"])
def test_each_is_told_what_starts_its_ranks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    if platform == "sge":
        request.getfixturevalue("sge")
    else:
        on(monkeypatch, "skypilot.node1")
    by_hand = "or by spawn() or Parallel() with nproc_per_node"
    for launcher, how in {
        "processes": 'nnodes="auto" to Parallel' if platform == "sge" else "or call Parallel()",
        "mpi": f"start them by unisono run --launcher mpi, {by_hand}",
        "horovod": f"start them by horovodrun, {by_hand}",
        "a plug-in's": 'start them by the launcher "a plug-in\'s"',
    }.items():
        with pytest.warns(UserWarning, match="alone") as caught:
            _warn_on_a_node(launcher)
        text = str(caught[0].message)
        assert how in text
        assert "rank=0, world_size=1" in text


def test_a_rank_that_is_alone_on_one_of_several_nodes_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, "skypilot.node1")
    with pytest.warns(UserWarning, match="skypilot reports 2 nodes") as caught:
        unisono.initialize("gloo")
    unisono.finalize()
    assert caught[0].filename == __file__
    unisono.initialize("gloo", rank=0, world_size=1)  # which says that it is meant
    unisono.finalize()
    monkeypatch.delenv("SKYPILOT_NODE_IPS")  # refused where ranks would be started by it
    unisono.initialize("gloo")
    unisono.finalize()


def test_one_node_without_accelerators_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"}
    on(monkeypatch, "skypilot.node0", **alone, SKYPILOT_NUM_GPUS_PER_NODE="0")
    is_alone(None)


def test_a_rank_stays_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins by initialize(), as a rank that meets others."""
    on(monkeypatch, "skypilot.node1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    on(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    refuse(EnvironmentDetectionError, "MASTER_PORT='0'")


@pytest.mark.parametrize(
    ("said", "nnodes", "world_size", "count"),
    [
        ("8", 2, None, 8),
        ("8", 2, 2, 8),  # WORLD_SIZE counts nodes, and each is to have 8
        ("1", 2, 2, None),  # both meanings are the same
        (None, 2, 2, None),  # as before
        ("auto", 2, 2, 4),
        ("cpu", 2, None, 3),
        ("8", 1, None, 8),
        ("8", 1, 1, 8),
        ("8", 1, 4, None),  # ranks that were started by hand
        ("gpu", 1, 1, 4),
        (None, 1, None, None),
        (None, 2, None, 4),
    ],
)
def test_how_many_ranks_a_node_gets(
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    nnodes: int,
    world_size: int | None,
    count: int | None,
) -> None:
    monkeypatch.setattr("unisono.accelerators.accelerator_count", lambda: 4)
    monkeypatch.setattr("unisono.node.usable_cores", lambda: 3)
    info = NodeInfo(0, nnodes, nnodes, None, PORT, said, "kubeflow")
    assert _ranks_to_start(info, world_size) == count
