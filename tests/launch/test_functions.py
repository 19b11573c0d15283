"""Functions on the real launchers: results and errors by rank."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError as NotYetError
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.support.command import nobody_is_left, started
from unisono.errors import ArgumentError, LaunchError, WorkerFailedError

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def facts(local_rank: int, value: int) -> tuple[Any, ...]:
    if value < 0 and unisono.get_rank() == 1:
        raise KeyError("from rank 1")
    place = (unisono.get_rank(), local_rank, unisono.get_node_rank(), unisono.get_nnodes())
    return (*place, unisono.get_nproc_per_node(), unisono.all_reduce(value))


@pytest.mark.filterwarnings("default")  # Ray's own
def test_results_and_errors_come_back_by_rank(launcher: str) -> None:
    with unisono.Parallel("gloo", nproc_per_node=2, launcher=launcher) as parallel:
        assert parallel.run(facts, 3) == [(0, 0, 0, 1, 2, 6), (1, 1, 0, 1, 2, 6)]
        captured = 5
        assert parallel.run(lambda local_rank: captured + local_rank) == [5, 6]
        with pytest.raises(WorkerFailedError, match="rank 1 of 2") as raised:
            parallel.run(facts, -3)
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)
    assert "from rank 1" in raised.value.traceback


def ends_early(local_rank: int, victim: int) -> int:
    if local_rank == victim == 0:
        os._exit(0)  # as a library that leaves
    if local_rank == victim:
        atexit.register(os._exit, 0)
    return local_rank


@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_a_result_is_a_failure(launcher: str, victim: int) -> None:
    if (launcher, victim) == ("ray", 1):
        pytest.skip(
            "an actor has Ray's own exit handlers, and hasn't ended when its result is there"
        )
    options: dict[str, Any] = {"nproc_per_node": 2, "launcher": launcher, "timeout": 20}
    with pytest.raises(WorkerFailedError, match="rank [01] of 2") as raised:
        unisono.spawn("gloo", ends_early, (victim,), **options)
    assert raised.value.rank == victim


def leaves_behind(local_rank: int, released: str, file: str, say: str) -> int:
    def finish() -> None:
        Path(released).read_text()
        Path(file).write_text("whole")

    threading.Thread(target=finish).start()
    Path(say).write_text("")
    return local_rank


def test_what_a_function_leaves_behind_is_done_before_its_result(
    launcher: str, tmp_path: Path
) -> None:
    if launcher == "ray":
        pytest.skip("an actor ends at the end of the job, whatever its threads do")
    args = [str(tmp_path / name) for name in ("released", "file", "said")]
    released, file, said = args
    os.mkfifo(released)
    os.mkfifo(said)
    with ThreadPoolExecutor(1) as spawning:
        found = spawning.submit(unisono.spawn, "gloo", leaves_behind, args, launcher=launcher)
        Path(said).read_text()
        with pytest.raises(NotYetError):
            found.result(0.5)
        Path(released).write_text("go")
        assert found.result() == [0]
    assert Path(file).read_text() == "whole"


@pytest.mark.parametrize("launcher", ["slurm"], indirect=True)
def test_slurm_runs_functions_on_all_nodes(launcher: str) -> None:
    options: dict[str, Any] = {"options": {"export": "NONE"}}  # as many sites have it
    where: dict[str, Any] = {"nproc_per_node": 2, "nnodes": 2, "launcher": launcher}
    found = unisono.spawn("gloo", facts, (3,), **where, launcher_options=options)
    assert found == [(rank, rank % 2, rank // 2, 2, 2, 12) for rank in range(4)]


@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.parametrize("launcher", ["ray"], indirect=True)
def test_ray_seats_nodes_of_different_size(launcher: str) -> None:
    library = pytest.importorskip("ray")
    utils = pytest.importorskip("ray.cluster_utils")
    memory = 100 * 2**20
    head = {"num_cpus": 3, "object_store_memory": memory}
    cluster = utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=memory)
        library.init(address=cluster.address)
        options: dict[str, Any] = {"launcher": launcher, "launcher_options": {"counts": (3, 1)}}
        with pytest.raises(ArgumentError, match="of 2 nodes: pass nnodes=2"):
            unisono.spawn("gloo", facts, (3,), **options)
        options["nnodes"] = 2
        found = unisono.spawn("gloo", facts, (3,), **options)
        assert found == [*((r, r, 0, 2, 3, 12) for r in range(3)), (3, 0, 1, 2, 1, 12)]
        options["launcher_options"] = {"counts": (3, 3), "timeout_s": 1.0}
        with pytest.raises(LaunchError, match=r"no room in 1 s .*'CPU': 3.0"):
            unisono.spawn("gloo", facts, (3,), **options)
    finally:
        library.shutdown()
        cluster.shutdown()


OTHER_RAY = """
import ray, signal
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
print("AT", ray.get_runtime_context().gcs_address, "READY", flush=True)
signal.pause()
"""


def cluster_of_ray(local_rank: int) -> str:
    return str(importlib.import_module("ray").get_runtime_context().gcs_address)


@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.usefixtures("own_ray")
def test_ray_joins_the_cluster_that_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"nproc_per_node": 2, "launcher": "ray"}
    with started([sys.executable, "-c", OTHER_RAY]) as other:
        other.wait_for("READY", 1)
        address = other.out().split()[1]
        found = unisono.spawn("gloo", cluster_of_ray, **options)
        assert len(set(found)) == 1
        assert address not in found
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert unisono.spawn("gloo", cluster_of_ray, **options) == [address] * 2
        other.end(signal.SIGTERM, 60.0)
        nobody_is_left(other.mark, 20.0)
    with pytest.raises(LaunchError, match=f"no Ray cluster can be joined at RAY_ADDRESS={address}"):
        unisono.spawn("gloo", cluster_of_ray, **options)


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("gloo", {"launcher": "nope"}, "unknown launcher 'nope'"),
        ("gloo", {"launcher_options": {"timeout": 1}}, "'timeout_s'"),
        ("gloo", {"start_method": "fork"}, "does not support start_method="),
        ("gloo", {"join": False}, "does not support join=False"),
        ("gloo", {"nnodes": 2}, "master_addr"),
        ("threads", {}, "are threads"),  # which no launcher makes
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    backend: str, options: dict[str, Any], said: str
) -> None:
    given = {"nproc_per_node": 2, "launcher": "torchrun", **options}
    with pytest.raises(ArgumentError, match=said):
        unisono.spawn(backend, facts, (3,), **given)
