"""Several nodes, of different size, on the real launchers; and restarts."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import (
    DIGITS,
    GONE_S,
    JOB,
    LIMIT_S,
    UNISONO,
    Done,
    environ,
    learnt,
    learnt_alone,
    nobody_is_left,
    run,
    started,
)
from tests.support.processes import until
from tests.support.requirements import require
from tests.support.virtual_hosts import Hosts

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
MPI = {  # what mpirun wants from root and for more ranks than cores, by Open MPI 4 and by 5
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def three_and_one(found: list[dict[str, Any]]) -> None:
    assert [fact["rank"] for fact in found] == [0, 1, 2, 3]
    assert [fact["world_size"] for fact in found] == [4] * 4
    assert [fact["local_rank"] for fact in found] == [0, 1, 2, 0]
    assert [fact["nproc_per_node"] for fact in found] == [3, 3, 3, 1]
    assert [fact["node_rank"] for fact in found] == [0, 0, 0, 1]
    assert [fact["nnodes"] for fact in found] == [2] * 4
    assert [fact["ranks"] for fact in found] == [[0, 1, 2, 3]] * 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_both(hosts: Hosts, words: list[list[str]]) -> list[Done]:
    """Run one command on each host, and wait for both."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(started(hosts.on(i, each))) for i, each in enumerate(words)]
        for job in jobs:
            code = job.process.wait(LIMIT_S)
            assert code == 0, job.err() + job.out()
        return [Done(0, job.out(), job.err(), 0.0) for job in jobs]


def test_slurm_with_its_variables_alone(slurm: dict[str, str]) -> None:
    done = run(["srun", "--nodes=2", "--ntasks=4", sys.executable, JOB, "facts", "gloo"], **slurm)
    assert done.code == 0, done.err
    three_and_one(done.facts())


def test_unisono_run_on_slurm_nodes_of_different_size(slurm: dict[str, str]) -> None:
    words = [*UNISONO, "run", "--launcher", "slurm", "--hosts", "n1:3,n2:1"]
    done = run([*words, JOB, "facts", "gloo"], **slurm)
    assert done.code == 0, done.err
    three_and_one(done.facts())


def test_the_batch_script_runs(slurm: dict[str, str], tmp_path: Path) -> None:
    words = [*UNISONO, "run", "--launcher", "slurm", "--nnodes", "2", "--nproc-per-node", "2"]
    printed = run([*words, "--print", JOB, "facts", "gloo"], **slurm)
    assert printed.code == 0, printed.err
    file = tmp_path / "job.sh"
    file.write_text(printed.out)
    done = run(["sbatch", "--wait", f"--output={tmp_path}/out", str(file)], **slurm)
    text = (tmp_path / "out").read_text()
    assert done.code == 0, text
    found = Done(0, text, "", 0.0).facts()
    assert [(fact["rank"], fact["node_rank"]) for fact in found] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_torchrun_on_two_hosts_of_different_size(hosts: Hosts) -> None:
    where = ["--nnodes=2", f"--master-addr={hosts.addresses[0]}", "--master-port=29517"]
    words = [
        [*TORCHRUN, *where, f"--node-rank={i}", f"--nproc-per-node={n}", JOB, "facts", "gloo"]
        for i, n in enumerate((3, 1))
    ]
    done = on_both(hosts, words)
    three_and_one(done[0].facts() + done[1].facts())


@pytest.mark.parametrize("is_seated", [True, False])
def test_unisono_run_on_two_hosts_of_different_size(hosts: Hosts, is_seated: bool) -> None:
    where = ["--nnodes", "2", "--master-addr", hosts.addresses[0], "--master-port", "29518"]
    words = []
    for i, n in enumerate((3, 1)):
        seat = ["--node-rank", str(i)] if is_seated else []
        one = [*UNISONO, "run", *where, *seat, "--nproc-per-node", str(n), JOB, "facts", "gloo"]
        words.append(one)
    done = on_both(hosts, words)
    found = done[0].facts() + done[1].facts()
    if is_seated:
        three_and_one(found)
    assert sorted(fact["rank"] for fact in found) == [0, 1, 2, 3]
    assert sorted(fact["nproc_per_node"] for fact in found) == [1, 3, 3, 3]
    assert [fact["nnodes"] for fact in found] == [2] * 4


def test_digits_on_two_hosts(hosts: Hosts) -> None:
    where = ["--nnodes", "2", "--master-addr", hosts.addresses[0], "--master-port", "29519"]
    script = ["--backend", "gloo", DIGITS, "--epochs", "2"]
    words = [[*UNISONO, "run", *where, "--node-rank", str(i), *script] for i in (0, 1)]
    words = [[*each[:4], "--nproc-per-node", "1", *each[4:]] for each in words]
    done = on_both(hosts, words)
    for name in hosts.names:
        assert f"on {name}" in done[0].out


def test_an_unreachable_master_is_named_in_time() -> None:
    port = free_port()
    where = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1"]
    words = [*UNISONO, "run", *where, "--master-port", str(port), "--timeout", "2", JOB, "facts"]
    done = run(words)
    assert done.code == 1
    assert f"node 1 of 2 couldn't reach node 0 at 127.0.0.1:{port} in 2 s" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_master_that_doesnt_resolve_is_named_in_time(rank: str) -> None:
    where = ["--nnodes", "2", "--node-rank", rank, "--master-addr", "no-such-host.invalid"]
    words = [*UNISONO, "run", *where, "--master-port", "29500", "--timeout", "1", JOB, "facts"]
    done = run(words)
    assert done.code == 1
    named = f"node {rank}: --master-addr 'no-such-host.invalid'"
    assert f"{named} still doesn't resolve after 1 s" in done.err
    assert "correct it, or make the name known to this host" in done.err
    assert "Traceback" not in done.err


def test_a_master_whose_name_is_known_later_is_met(hosts: Hosts) -> None:
    """As in a Job of Kubernetes, whose pods start before DNS knows the first one."""
    where = ["--nnodes", "2", "--master-addr", "leader", "--master-port", "29520"]
    where += ["--nproc-per-node", "1"]
    words = [[*UNISONO, "run", *where, "--node-rank", str(i), JOB, "facts"] for i in (0, 1)]
    before = [file.read_text() for file in hosts.files]
    with ExitStack() as stack:
        jobs = [stack.enter_context(started(hosts.on(i, each))) for i, each in enumerate(words)]
        until(lambda: all("resolve yet" in job.err() for job in jobs), LIMIT_S)
        try:
            for file, text in zip(hosts.files, before, strict=True):
                file.write_text(f"{text}{hosts.addresses[0]} leader\n")
            for job in jobs:
                assert job.process.wait(LIMIT_S) == 0, job.err()
        finally:
            for file, text in zip(hosts.files, before, strict=True):
                file.write_text(text)
        found = [Done(0, job.out(), job.err(), 0.0).facts() for job in jobs]
    assert [[fact["rank"] for fact in facts] for facts in found] == [[0], [1]]


@pytest.mark.parametrize(("name", "mode"), [("processes", "kill-once"), ("torchrun", "raise-once")])
def test_a_failed_rank_is_started_again_and_the_job_ends_well(name: str, mode: str) -> None:
    words = [*UNISONO, "run", "--launcher", name, "--nproc-per-node", "2", "--max-restarts", "1"]
    done = run([*words, JOB, mode, "gloo"])
    assert done.code == 0, done.err
    assert done.out.count("DONE") == 2
    assert done.out.count("FACTS") == 4
    assert "error: rank" not in done.err


@pytest.mark.parametrize("name", ["processes", "torchrun"])
def test_restarts_come_to_an_end(name: str) -> None:
    words = [*UNISONO, "run", "--launcher", name, "--nproc-per-node", "2", "--max-restarts", "1"]
    done = run([*words, JOB, "kill", "gloo"])
    assert done.code == 128 + signal.SIGKILL
    assert done.out.count("FACTS") == 4
    assert "error: rank 1 of 2" in done.err


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([*TORCHRUN, "--standalone", "--nproc-per-node=2"], "native-dist"),
        (["mpirun", "-n", "2", sys.executable], "native-dist"),
        (["mpirun", "-n", "2", sys.executable], "mpi-dist"),
        (["horovodrun", "--gloo", "-np", "2", sys.executable], "horovod-dist"),
        (["mpirun", "-n", "2", sys.executable], "horovod-dist"),
        (["srun", "--nodes=2", "--ntasks=2", sys.executable], "native-dist"),
        ([sys.executable], "serial"),
    ],
    ids=lambda value: str(value[0]).rpartition("/")[2] if isinstance(value, list) else str(value),
)
def test_digits_unchanged_however_started(
    words: list[str], model: str, request: pytest.FixtureRequest
) -> None:
    backend = {"native-dist": "gloo", "mpi-dist": "mpi4py", "horovod-dist": "horovod"}.get(model)
    variables: dict[str, str] = {}
    if words[0] == "srun":
        variables = request.getfixturevalue("slurm")
    elif words[0] == "mpirun":
        request.getfixturevalue("mpi")
        variables = MPI
    elif words[0] == "horovodrun" and shutil.which("horovodrun") is None:
        require("horovod", "horovodrun isn't installed")
    if backend in ("mpi4py", "horovod"):
        library = {"mpi4py": "mpi4py", "horovod": "horovod"}[backend]
        code = subprocess.run([sys.executable, "-c", f"import {library}"], env=environ(""))
        require(library, None if code.returncode == 0 else f"{library} isn't installed")
    script = [DIGITS, "--epochs", "2", *(["--backend", backend] if backend else [])]
    done = run([*words, *script], **variables)
    assert done.code == 0, done.err
    assert f"({model})" in done.out
    assert learnt(done.out) == learnt_alone("2")


def test_a_node_that_is_interrupted_leaves_nobody(hosts: Hosts) -> None:
    where = ["--nnodes", "2", "--master-addr", hosts.addresses[0], "--master-port", "29520"]
    words = [*UNISONO, "run", *where, "--nproc-per-node", "1"]
    tail = [JOB, "wait", "gloo"]
    with (
        started(hosts.on(0, [*words, "--node-rank", "0", *tail])) as one,
        started(hosts.on(1, [*words, "--node-rank", "1", *tail])) as other,
    ):
        one.wait_for("READY", 1)
        other.wait_for("READY", 1)
        for job in (one, other):
            assert job.end(signal.SIGINT, 2 * GONE_S) == 128 + signal.SIGINT
            nobody_is_left(job.mark)
