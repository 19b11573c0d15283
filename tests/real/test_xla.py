"""The XLA model on torch_xla's CPU device: one replica, and two that are threads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import unisono as idist
from tests.real import xla_job
from tests.real.jobs import check_digits, check_killed_parent, with_model
from tests.real.refusals import refusals
from tests.real.xla_users import WAYS
from tests.support.pages import ROOT
from tests.support.processes import run_python
from tests.support.requirements import require
from tests.support.tops import check, check_end, ends_on, job_of_program, told
from unisono.errors import ArgumentError, LaunchError, UnsupportedOperation, WorkerFailedError
from unisono.launchers import xla as launcher
from unisono.models.xla.model import XlaModel
from unisono.topology import LaunchPlan

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
Rows: TypeAlias = "list[dict[str, Any]]"
"""What checks found, by rank and name."""


@pytest.fixture(autouse=True, scope="module")
def _torch_xla() -> None:
    text = "torch_xla isn't installed: pip install torch==2.9.0 torch_xla==2.9.0"
    require("xla", None if importlib.util.find_spec("torch_xla") else text)


def launch(entry: Callable[[XlaModel], Any], n: int) -> Any:
    plan = LaunchPlan(n, backend="xla-cpu")
    run = partial(with_model, XlaModel, "xla-cpu", entry, {})
    return launcher.launch(run, plan, environ=XlaModel.worker_environ(plan))


def check_in(n: int, folder: Path, *names: str) -> Rows:
    """Run checks in one launch of n replicas; give what each found, by rank and name."""
    plan = LaunchPlan(n, backend="xla-cpu")
    environ = {**XlaModel.worker_environ(plan), xla_job.FOLDER: str(folder)}
    rows: Rows = launcher.launch(partial(xla_job.run_checks, names), plan, environ=environ)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checks")


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    """What two replicas found, which leave this process as it was."""
    before = dict(os.environ)
    found = check_in(2, folder, *xla_job.CHECKS)
    assert dict(os.environ) == before
    assert "torch_xla" not in sys.modules
    return found


def of(rows: Rows, name: str) -> list[Any]:
    """Give what a check returned, by rank."""
    found = [row[name] for row in rows]
    failed = [str(each) for each in found if isinstance(each, RuntimeError)]
    assert not failed, "\n".join(failed)
    return found


FOUND = ("steps", "trained", "saved", "digits", "tensors")
"""Checks that return what the tests below look at."""


@pytest.mark.parametrize("name", [name for name in xla_job.CHECKS if name not in FOUND])
def test_two_replicas(name: str, rows: Rows) -> None:
    assert of(rows, name) == [None] * 2


def test_a_replica_may_be_alone(tmp_path: Path) -> None:
    names = ("check_collectives", "facts")
    rows = check_in(1, tmp_path, *names)
    assert [of(rows, name) for name in names] == [[None], [None]]


def test_graphs_do_not_grow_from_step_to_step(rows: Rows) -> None:
    (more, weight), (_, other) = of(rows, "steps")
    assert more == 0
    assert torch.equal(weight, other)
    (_, wanted), _ = idist.spawn("threads", xla_job.steps, nproc_per_node=2)
    assert torch.allclose(weight, wanted, atol=1e-5)


def test_two_replicas_train_as_one_process_does(rows: Rows) -> None:
    net = xla_job.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in torch.split(xla_job.data(), 4):
            net(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for trained in of(rows, "trained"):
        torch.testing.assert_close(trained, list(net.parameters()), rtol=1e-5, atol=1e-5)


def test_what_two_replicas_save_loads_there_and_without_xla(rows: Rows, folder: Path) -> None:
    loaded = of(rows, "saved")
    net = xla_job.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    idist.load_checkpoint(folder / "x.pt", into={"model": net, "optimizer": optimizer})
    for parameters in loaded:
        torch.testing.assert_close(parameters, list(net.parameters()), rtol=0, atol=0)
    assert all(item["momentum_buffer"].any() for item in optimizer.state.values())


def test_the_digits_example_learns_the_same_parameters(rows: Rows) -> None:
    found, other = of(rows, "digits")
    assert found["parameters"] == other["parameters"]
    assert (found["backend"], found["accuracy"] > 0.85) == ("xla-cpu", True)
    check_digits(found, "xla-dist", 2, epochs=3)


def test_results_on_xla_devices_arrive_on_the_cpu(rows: Rows) -> None:
    found = of(rows, "tensors")
    assert [row["x"].tolist() for row in found] == [[0, 0], [1, 1]]
    assert all(row[key].device.type == "cpu" for row in found for key in row)
    assert found[0]["leaf"].requires_grad


def test_a_failing_replica_is_named_and_not_what_it_caused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 of 2 raised OSError") as caught:
        launch(partial(xla_job.one_aborts, tmp_path / "seen"), 2)
    assert caught.value.rank == 1
    assert "in one_aborts" in caught.value.traceback
    assert str(caught.value.__cause__) == "the cause"


@pytest.mark.parametrize("n", [1, 2])
def test_a_dead_process_is_reported_with_what_it_printed(n: int) -> None:
    entry = xla_job.one_kills_all if n > 1 else (lambda model: os.abort())
    with pytest.raises(WorkerFailedError, match="ended") as caught:
        launch(entry, n)
    assert "Fatal Python error: Aborted" in str(caught.value)
    assert n == 1 or "my last words" in str(caught.value)


def test_a_graph_without_all_replicas_ends_the_job_in_the_end() -> None:
    with pytest.raises(WorkerFailedError, match="Expected 2 threads to join") as caught:
        launch(xla_job.alone_in_a_graph, 2)
    assert str(caught.value).count(" in alone_in_a_graph") == 2


def test_a_user_may_start_xla_in_many_ways() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    passed = run_python("-m", "tests.real.xla_users", port, cwd=ROOT).splitlines()
    alone = ["asks", "probes", "initializes_alone", "lacks_something"]
    wanted = [*alone, *(how for how in ("adopts", *WAYS) for _ in range(2))]
    assert [line for line in passed if not line.startswith("[Gloo]")] == wanted


def test_the_replicas_die_with_the_parent(tmp_path: Path) -> None:
    check_killed_parent("xla-cpu", tmp_path)


def test_bad_requests_are_refused_before_anything_starts() -> None:
    with pytest.raises(UnsupportedOperation, match="2 nodes"):
        XlaModel.worker_environ(LaunchPlan(2, nnodes=2, backend="xla-cpu"))
    with pytest.raises(ArgumentError, match="start_method"):
        launcher.launch(str, LaunchPlan(1, start_method="spawn"), environ={})


def test_a_number_of_replicas_that_the_runtime_lacks_is_named() -> None:
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    with pytest.raises(LaunchError, match="has 2 devices on this node: ask for 2"):
        launcher.launch(str, LaunchPlan(3), environ=env)


def test_the_reason_says_what_is_missing_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert XlaModel.why_unavailable("xla-cpu") is None
    assert "nccl" in str(XlaModel.why_unavailable("xla-cuda"))
    assert "TPU" in str(XlaModel.why_unavailable("xla-tpu")) or "libtpu" in str(
        XlaModel.why_unavailable("xla-tpu")
    )
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    reason = str(XlaModel.why_unavailable("xla-cpu"))
    assert "this is torch 2.13.0" in reason
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in reason


def installed() -> Path:
    distribution = importlib.metadata.distribution("torch_xla")
    return Path(str(distribution.locate_file("")))


def test_a_torch_xla_that_does_not_work_is_unavailable_and_harms_nothing(tmp_path: Path) -> None:
    other, broken = tmp_path / "other", tmp_path / "broken"
    (copied,) = installed().glob("torch_xla-*.dist-info")
    shutil.copytree(copied, other / "torch_xla-2.8.1.dist-info")
    path = other / "torch_xla-2.8.1.dist-info" / "METADATA"
    path.write_text(path.read_text().replace("\nVersion: ", "\nVersion: 2.8.1+was.", 1))
    (broken / "torch_xla").mkdir(parents=True)
    for path in (installed() / "torch_xla").iterdir():
        (broken / "torch_xla" / path.name).symlink_to(path)
    (extension,) = installed().glob("_XLAC.*.so")
    (broken / extension.name).write_bytes(b"no library")
    found = refusals("xla-cpu", {"other": other, "broken": broken})

    known, *refused = found["other"]
    assert "works with torch 2.8.1 alone, and this is torch 2.9" in known
    assert "python -m pip install torch==2.8.1 torch_xla==2.8.1" in known
    assert len(refused) == 2
    for line in refused:
        assert line.startswith("NoneType backend 'xla-cpu' can't be used here: torch_xla 2.8.1")

    known, initialize, spawn = found["broken"]
    assert known == "None"  # only its import can tell
    assert initialize.startswith("ImportError torch_xla can't be imported: ImportError")
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in initialize
    assert "the process of XLA's replicas ended with exit code 1" in spawn
    assert "ImportError" in spawn


@pytest.mark.usefixtures("own_pages")
@pytest.mark.parametrize("kind", ["in_c", "extra_call"])
def test_top_names_the_replica_that_hangs(kind: str) -> None:
    with job_of_program(kind, "xla-cpu"):
        check(kind, told())


@pytest.mark.usefixtures("own_pages")
@pytest.mark.parametrize("kind", ends_on("xla-cpu"))
def test_a_job_that_does_not_hang_names_the_replica_as_it_ends(kind: str) -> None:
    check_end(kind, "xla-cpu")
