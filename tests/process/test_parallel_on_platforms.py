"""``Parallel`` on a platform's node; that nodes meet is tested where there are two hosts."""

from __future__ import annotations

import logging

import pytest

import unisono
from tests.support.platforms import NODES
from unisono.environments.platforms import PORT
from unisono.errors import ArgumentError, EnvironmentDetectionError
from unisono.parallel import _count
from unisono.topology import NodeInfo


def on(monkeypatch: pytest.MonkeyPatch, name: str, **changes: str) -> None:
    for variable, value in {**NODES[name].env, **changes}.items():
        monkeypatch.setenv(variable, value)


def own_rank(local_rank: int) -> int:
    return unisono.get_rank()


def test_it_says_which_node_it_takes_this_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, "skypilot.node1")
    with caplog.at_level(logging.INFO, "unisono.parallel"), unisono.Parallel("gloo"):
        pass
    assert "node 1 of 2, as skypilot says: 2 processes here, node 0 is 10.0.0.1" in caplog.text
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, "unisono.parallel"),
        unisono.Parallel("gloo", nproc_per_node=3, master_port=4711),
    ):
        pass
    assert "node 1 of 2, as skypilot says: 3 processes here" in caplog.text


def test_what_the_program_says_comes_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")  # partial, and would be refused
    caplog.set_level(logging.INFO, "unisono.parallel")
    with unisono.Parallel("gloo", nproc_per_node=1, nnodes=1):
        pass
    with unisono.Parallel("threads", nproc_per_node=2) as parallel:
        assert parallel.run(own_rank) == [0, 1]
    with pytest.raises(EnvironmentDetectionError, match="SKYPILOT_NUM_NODES"):
        unisono.Parallel("gloo", nproc_per_node=1).__enter__()
    assert "says" not in caplog.text


def test_a_rank_that_is_alone_on_one_of_several_nodes_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on(monkeypatch, "skypilot.node1")
    with pytest.warns(UserWarning, match="skypilot says that it is one of 2 nodes") as caught:
        unisono.initialize("gloo")
    unisono.finalize()
    assert caught[0].filename == __file__
    unisono.initialize("gloo", rank=0, world_size=1)  # which says that it is meant
    unisono.finalize()
    monkeypatch.delenv("SKYPILOT_NODE_IPS")  # refused where ranks would be started by it
    unisono.initialize("gloo")
    unisono.finalize()


def test_threads_are_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "skypilot.node1")
    with unisono.Parallel("threads", nproc_per_node=2) as parallel:
        assert parallel.run(own_rank) == [0, 1]


def test_one_node_without_accelerators_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"}
    on(monkeypatch, "skypilot.node0", **alone, SKYPILOT_NUM_GPUS_PER_NODE="0")
    with unisono.Parallel() as parallel:
        assert parallel.run(own_rank) == [0]
        assert unisono.model_name() == "serial"


def test_nodes_that_seat_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "kubeflow.node1", PET_NNODES="1:4")
    with pytest.raises(ArgumentError, match="seat themselves.*start the script with unisono run"):
        unisono.Parallel("gloo").__enter__()


def test_a_rank_stays_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "skypilot.node1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(EnvironmentDetectionError, match="MASTER_PORT='0'"):
        unisono.Parallel("gloo").__enter__()  # by initialize(), as a rank that meets others


@pytest.mark.parametrize(
    ("said", "nnodes", "is_rank", "count"),
    [
        ("8", 2, False, 8),
        ("8", 2, True, 8),  # WORLD_SIZE counts nodes, and each is to have 8
        ("1", 2, True, None),  # both meanings are the same
        (None, 2, True, None),
        ("auto", 2, True, None),
        ("8", 1, False, 8),
        (None, 1, False, None),
    ],
)
def test_how_many_ranks_a_node_gets(
    said: str | None, nnodes: int, is_rank: bool, count: int | None
) -> None:
    info = NodeInfo(0, nnodes, nnodes, None, PORT, said, "kubeflow")
    assert _count(info, is_rank) == count
