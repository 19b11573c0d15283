"""Functions on the real launchers: results and errors by rank."""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unisono
from tests.launch.conftest import OF_RAY
from tests.support.command import nobody_is_left, started
from unisono.errors import ArgumentError, LaunchError, WorkerFailedError

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
Launcher = tuple[str, dict[str, str]]


def facts(local_rank: int, value: int) -> tuple[Any, ...]:
    if value < 0 and unisono.get_rank() == 1:
        raise KeyError("from rank 1")
    place = (unisono.get_rank(), local_rank, unisono.get_node_rank(), unisono.get_nnodes())
    return (*place, unisono.get_nproc_per_node(), unisono.all_reduce(value))


@pytest.fixture
def ready(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> str:
    name, variables = launcher
    for key, value in {**variables, **OF_RAY}.items():
        monkeypatch.setenv(key, value)
    return name


@pytest.mark.filterwarnings("default")  # Ray's own
def test_results_and_errors_come_back_by_rank(ready: str) -> None:
    with unisono.Parallel("gloo", nproc_per_node=2, launcher=ready) as parallel:
        assert parallel.run(facts, 3) == [(0, 0, 0, 1, 2, 6), (1, 1, 0, 1, 2, 6)]
        captured = 5
        assert parallel.run(lambda local_rank: captured + local_rank) == [5, 6]
        with pytest.raises(WorkerFailedError, match="rank 1 of 2") as raised:
            parallel.run(facts, -3)
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)
    assert "from rank 1" in raised.value.traceback


def ends_early(local_rank: int) -> int:
    if local_rank == 0:
        os._exit(0)  # as a library that leaves
    return local_rank


def cut_off(local_rank: int) -> int:
    if local_rank == 1:
        atexit.register(os._exit, 0)
    return local_rank


@pytest.mark.filterwarnings("default")  # Ray's own
@pytest.mark.parametrize("fn", [ends_early, cut_off])
def test_a_rank_without_a_result_is_a_failure(ready: str, fn: Callable[[int], int]) -> None:
    if (ready, fn) == ("ray", cut_off):
        pytest.skip(
            "an actor has Ray's own exit handlers, and hasn't ended when its result is there"
        )
    with pytest.raises(WorkerFailedError, match="rank [01] of 2") as raised:
        unisono.spawn("gloo", fn, nproc_per_node=2, launcher=ready, timeout=20)
    assert raised.value.rank == (0 if fn is ends_early else 1)


def late(released: str, file: str) -> None:
    with open(released) as stream:
        stream.read()
    Path(file).write_text("whole")


def leaves_behind(local_rank: int, released: str, file: str, say: str) -> int:
    threading.Thread(target=late, args=(released, file)).start()
    Path(say).write_text("")
    return local_rank


def test_what_a_function_leaves_behind_is_done_before_its_result(
    ready: str, tmp_path: Path
) -> None:
    if ready == "ray":
        pytest.skip("an actor ends at the end of the job, whatever its threads do")
    released, file, said = (str(tmp_path / name) for name in ("released", "file", "said"))
    os.mkfifo(released)
    os.mkfifo(said)
    found: list[Any] = []
    args = (released, file, said)

    def run() -> None:
        found.extend(unisono.spawn("gloo", leaves_behind, args, launcher=ready))

    spawning = threading.Thread(target=run)
    spawning.start()
    Path(said).read_text()
    spawning.join(0.5)
    assert spawning.is_alive()
    Path(released).write_text("go")
    spawning.join()
    assert (found, Path(file).read_text()) == ([0], "whole")


def fails_once(local_rank: int, folder: str) -> tuple[int, str]:
    if local_rank == 1 and not Path(folder, "failed").exists():
        unisono.barrier()
        Path(folder, "failed").touch()
        raise ValueError("once")
    if not Path(folder, "failed").exists():
        unisono.barrier()
    return unisono.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]


@pytest.mark.filterwarnings("default")
def test_results_of_an_earlier_attempt_do_not_count(tmp_path: Path) -> None:
    options: dict[str, Any] = {"launcher": "torchrun", "launcher_options": {"max_restarts": 1}}
    found = unisono.spawn("gloo", fails_once, (str(tmp_path),), nproc_per_node=2, **options)
    assert found == [(0, "1"), (1, "1")]


def test_slurm_runs_functions_on_all_nodes(
    slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in slurm.items():
        monkeypatch.setenv(key, value)
    found = unisono.spawn("gloo", facts, (3,), nproc_per_node=2, nnodes=2, launcher="slurm")
    assert found == [(rank, rank % 2, rank // 2, 2, 2, 12) for rank in range(4)]


@pytest.mark.filterwarnings("default")  # Ray's own
def test_ray_seats_nodes_of_different_size(ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in OF_RAY.items():
        monkeypatch.setenv(key, value)
    library = pytest.importorskip("ray")
    utils = pytest.importorskip("ray.cluster_utils")
    memory = 100 * 2**20
    head = {"num_cpus": 3, "object_store_memory": memory}
    cluster = utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=memory)
        library.init(address=cluster.address)
        options: dict[str, Any] = {"launcher": "ray", "launcher_options": {"counts": (3, 1)}}
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
    ("options", "said"),
    [
        ({"launcher": "nope"}, "unknown launcher 'nope'"),
        ({"launcher": "torchrun", "launcher_options": {"max_restart": 1}}, "'max_restarts'"),
        ({"launcher": "torchrun", "start_method": "fork"}, "takes no start_method"),
        ({"launcher": "torchrun", "join": False}, "takes no join=False"),
        ({"launcher": "torchrun", "nnodes": 2}, "master_addr"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ArgumentError, match=said):
        unisono.spawn("gloo", facts, (3,), nproc_per_node=2, **options)


def test_threads_are_made_by_no_launcher() -> None:
    with pytest.raises(ArgumentError, match="are threads"):
        unisono.spawn("threads", facts, (3,), nproc_per_node=2, launcher="torchrun")
