"""Horovod, the real one: under horovodrun, under mpirun, and started by our own launcher."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.real.jobs import (
    PATH,
    check_digits,
    check_killed_parent,
    run_job,
    with_model,
    writing_to,
)
from tests.real.refusals import refusals
from tests.support.command import run
from tests.support.measures import slack
from tests.support.requirements import require, require_backend
from tests.support.tops import check, job_of_processes, told
from unisono.arguments import only_timeout_s
from unisono.context import communicator
from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    PayloadError,
    UnsupportedOperation,
    WorkerFailedError,
)
from unisono.model.reduction import ReduceOp
from unisono.topology import EVERYBODY, LaunchPlan, Topology

JOB = [sys.executable, "-m", "tests.real.horovod_job"]
GONE_WITHIN_S = 2.0
OF_EVERY_LAUNCHER = "collectives,mismatch,late,large,adopt,again,gone"
pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _installed() -> None:
    require_backend("horovod")


@pytest.fixture
def mpirun() -> list[str]:
    path = shutil.which("mpirun")
    require("horovod", None if path else "there is no mpirun")
    shown = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=True)
    is_open_mpi = "Open MPI" in shown.stdout or "OpenRTE" in shown.stdout
    return [str(path), *(["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else [])]


@pytest.fixture
def nothing_left(nothing_left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this of the programs, too, that Horovod starts."""
    monkeypatch.setenv("TMPDIR", str(nothing_left))


@pytest.fixture(scope="module")
def pool() -> Iterator[unisono.WorkerPool]:
    """Two warm ranks, there before a test looks what it leaves."""
    require_backend("horovod")
    with unisono.WorkerPool("horovod", nproc_per_node=2) as pool:
        pool.map(abs, [0])
        yield pool


def horovodrun(size: int, *options: str) -> list[str]:
    words = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
    return [*words, "-np", str(size), *options]


def test_every_part_under_horovodrun(tmp_path: Path) -> None:
    parts = f"absent,facade,digits,{OF_EVERY_LAUNCHER}"
    run_job([*horovodrun(3), *JOB], parts, 3, {**os.environ, **writing_to(tmp_path)})
    check_digits(json.loads((tmp_path / "digits").read_text()), "horovod-dist", 3)


def test_every_part_under_mpirun(mpirun: list[str]) -> None:
    run_job([*mpirun, "-np", "2", *JOB], f"mpi4py,{OF_EVERY_LAUNCHER}", 2)


def test_a_context_that_ends_mpi_is_the_last_one(mpirun: list[str]) -> None:
    run_job([*mpirun, "-np", "2", *JOB], "adopt,mpi_again", 2)


def test_names_do_not_depend_on_values(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    # So that Horovod has tensors.
    asked = {"HOROVOD_TIMELINE": str(timeline), "UNISONO_SHARED_BYTES": "0"}
    run_job([*horovodrun(2), *JOB], "names", 2, {**os.environ, **asked})
    names = set(re.findall(r'"name": "([^"]*unisono[^"]*)"', timeline.read_text()))
    # The barrier is the last one before the end, which Horovod doesn't always write down.
    assert names - {f"allreduce.unisono.{EVERYBODY}.barrier"} == {
        f"allreduce.unisono.{EVERYBODY}",
        f"allgather.unisono.{EVERYBODY}",
        f"alltoall.unisono.{EVERYBODY}",  # by which the ranks prove who they are
    }


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_a_rank_that_raises_ends_the_job(launcher: str, request: pytest.FixtureRequest) -> None:
    is_theirs = launcher == "horovodrun"
    command = horovodrun(2) if is_theirs else [*request.getfixturevalue("mpirun"), "-np", "2"]
    limit_s = 10.0 * slack()
    ended = run([*command, *JOB, "fail"], 120, PYTHONPATH=PATH)
    end = time.time()
    said = ended.out + ended.err
    assert ended.code != 0, said
    raised = re.search(r"ValueError: the original at ([\d.]+)", said)
    assert raised is not None, said
    assert end - float(raised[1]) < limit_s, said


def test_nodes_of_different_size() -> None:
    run_job([*horovodrun(3, "-H", "localhost:1,127.0.0.1:2"), *JOB], "nodes", 3)


def test_what_needs_no_peers() -> None:
    run_job(JOB, "glance,alone", 1)


def launch(entry: Callable[[Any], Any], plan: LaunchPlan | int = 2, **options: Any) -> Any:
    """Launch with a model in each replica."""
    from unisono.launchers import horovod as launcher
    from unisono.models.horovod.model import HorovodModel

    of_model = {"timeout": options.pop("timeout")} if "timeout" in options else {}
    limit_s = only_timeout_s("launch", of_model) or DEFAULT_TIMEOUT_S
    run = partial(with_model, HorovodModel, "horovod", entry, of_model)
    plan = plan if isinstance(plan, LaunchPlan) else LaunchPlan(plan)
    return launcher.launch(run, plan, stop_limit_s=limit_s, **options)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("size", [1, 3])
def test_launch_gives_results_by_rank(size: int, capfd: pytest.CaptureFixture[str]) -> None:
    offset = 10

    def entry(model: Any) -> tuple[Any, ...]:
        sys.stdout.write(f"out of {model.topology.rank}\n")
        sys.stderr.write(f"err of {model.topology.rank}\n")
        one = torch.tensor(model.topology.rank + offset)
        total = model.all_reduce(one.clone(), ReduceOp.SUM)
        last = model.new_group((model.topology.world_size - 1,))
        assert model.capabilities == {"groups"}
        with pytest.raises(UnsupportedOperation, match="send"):
            model.send(torch.ones(1), 0)
        with pytest.raises(UnsupportedOperation, match="recv"):
            model.recv(torch.ones(1), 0)
        gathered = model.all_gather(one).tolist()
        return model.topology, total.item(), gathered, last.ranks, sys.orig_argv

    ranks = range(size)
    values = [offset + rank for rank in ranks]
    for rank, (*found, words) in enumerate(launch(entry, size)):
        assert found == [Topology(rank, size, rank, size, 0, 1), sum(values), values, (size - 1,)]
        assert words[-1].count("join()") == 1  # no secret in the arguments, which anybody may list
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == [f"out of {rank}" for rank in ranks]
    assert {f"err of {rank}" for rank in ranks} <= set(said.err.splitlines())


@pytest.mark.usefixtures("nothing_left")
def test_spawn_through_the_facade_takes_options_of_horovods_own_launcher() -> None:
    def replica(local_rank: int, base: int) -> tuple[Any, ...]:
        idist = importlib.import_module("unisono")
        with ThreadPoolExecutor(1) as other:
            seen = other.submit(idist.get_rank).result()
        return idist.model_name(), idist.get_rank(), idist.all_reduce(base + local_rank), seen

    options: dict[str, Any] = {"use_gloo": True, "verbose": 1, "hosts": "localhost:2"}
    found = unisono.spawn("horovod", replica, (3,), nproc_per_node=2, **options)
    assert found == [("horovod-dist", rank, 7, rank) for rank in (0, 1)]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("end", "bad", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 0, (None, "SIGKILL")),
        (lambda: os._exit(3), 2, (3, None)),
    ],
    ids=["kill the first", "exit 3"],
)
def test_launch_names_the_rank_that_failed_first(
    end: Callable[[], None], bad: int, said: tuple[int | None, str | None]
) -> None:
    def entry(model: Any) -> None:
        model.new_group((0, 1))  # Horovod aborts processes whose peer is lost while there are any
        for number in range(1_000_000):
            model.all_reduce(torch.ones(2), ReduceOp.SUM)
            if number == 5 and model.topology.rank == bad:
                end()

    with pytest.raises(WorkerFailedError) as caught:
        launch(entry, 3)
    assert caught.value.rank == bad, caught.value
    assert (caught.value.exit_code, caught.value.signal) == said


def test_a_mismatch_is_relayed(pool: unisono.WorkerPool) -> None:
    def entry(local_rank: int) -> None:
        communicator().model.all_reduce(torch.ones(2 + local_rank), ReduceOp.SUM)

    with pytest.raises(WorkerFailedError, match="Mismatched") as caught:
        pool.run(entry)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


@pytest.mark.usefixtures("nothing_left")
def test_launch_refuses_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(PayloadError):
        launch(lambda _: lock)
    with pytest.raises(WorkerFailedError, match="pickle"):
        launch(lambda _: threading.Lock(), 1)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (LaunchPlan(1, nnodes=2), {}),
        (LaunchPlan(1, init_method="env://"), {}),
        (LaunchPlan(1, start_method="fork"), {}),
        (LaunchPlan(1), {"hosts": ""}),
        (LaunchPlan(2), {"hosts": "localhost"}),  # 1 rank there, and not 2
        (LaunchPlan(1), {"hosts": "localhost:0"}),
        (LaunchPlan(1), {"hosts": "localhost:1,localhost:1"}),
        (LaunchPlan(1), {"hosts": "localhost:2"}),
        (LaunchPlan(1, nnodes=3), {"hosts": "localhost:1,127.0.0.1:1"}),
    ],
)
def test_misuse_is_refused_before_anything_starts(
    plan: LaunchPlan, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ArgumentError):
        launch(lambda _: None, plan, **options)


FAKE_SSH = """#!/bin/sh
# ssh [options] HOST [options] COMMAND, run on this host
host=
while [ $# -gt 0 ]; do
  case "$1" in
    -o|-p|-i) shift 2;;
    -*) shift;;
    *) if [ -z "$host" ]; then host=$1; shift; else break; fi;;
  esac
done
exec sh -c "$*"
"""


@pytest.mark.usefixtures("nothing_left")
def test_launch_on_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is this one under another address, which Horovod takes for another host."""
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(FAKE_SSH)
    fake.chmod(0o755)
    monkeypatch.setitem(os.environ, "PATH", f"{fake.parent}:{os.environ['PATH']}")
    hosts = "localhost:1,127.0.0.2:2"

    def entry(model: Any) -> Any:
        ones = model.all_reduce(torch.ones(1), ReduceOp.SUM).item()
        return model.topology.node_rank, model.topology.local_rank, model.topology.nnodes, ones

    assert launch(entry, 2, hosts=hosts) == [(0, 0, 2, 3.0), (1, 0, 2, 3.0), (1, 1, 2, 3.0)]

    def fail(model: Any) -> None:
        if model.topology.rank == 1:
            raise ValueError("the original")
        model.exchange(b"")

    with pytest.raises(WorkerFailedError, match="the original") as caught:
        launch(fail, 1, hosts="localhost:1,127.0.0.2:1")
    assert caught.value.rank == 1


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    check_killed_parent("horovod", tmp_path)
    assert not list(tmp_path.iterdir())


SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
# What lies in place of the C++ part, what its build noted, what the refusal says, and whether it
# is known without an import.
BROKEN: dict[str, tuple[str | None, str, str, bool]] = {
    "missing": (None, torch.__version__, "without its C[+][+] part.*HOROVOD_WITH_PYTORCH=1", True),
    "built for another Python": (".cpython-27m.so", torch.__version__, "and this Python", True),
    "built for another torch": (SUFFIX, "1.5.0", "torch 1[.]5[.]0, but this is torch", True),
    "no library": (SUFFIX, torch.__version__, "mpi_lib_v2", False),
}


def test_a_broken_installation_says_so(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.submodule_search_locations
    source, folders = spec.submodule_search_locations[0], {}
    for how, (suffix, noted, _, _) in BROKEN.items():
        folders[how] = tmp_path / how
        copy = folders[how] / "horovod"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.so"))
        (copy / "metadata.json").write_text(json.dumps({"pytorch": noted}))
        if suffix is not None:
            (copy / "torch" / f"mpi_lib_v2{suffix}").write_bytes(b"\x7fELF, but no library")
    found = refusals("horovod", folders)
    for how, (_, _, sign, is_known) in BROKEN.items():
        known, *refused = found[how]
        assert (known != "None") == is_known
        assert len(refused) == 2
        for line in refused:
            assert re.match(f"{'NoneType' if is_known else 'ImportError'} .*{sign}", line)


@pytest.mark.usefixtures("own_pages")
@pytest.mark.parametrize("kind", ["stopped", "extra_call"])
def test_top_names_the_rank_that_hangs(kind: str) -> None:
    with job_of_processes(kind, "horovod"):
        check(kind, told())
