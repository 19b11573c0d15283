"""Several nodes, of different size, on the real launchers; and restarts."""

from __future__ import annotations

import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import LAUNCHERS, ended_well, known, on_both, on_hosts
from tests.support.command import (
    DIGITS,
    GONE_S,
    JOB,
    UNISONO,
    Done,
    learnt,
    learnt_alone,
    nobody_is_left,
    run,
)
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
RUN = (*UNISONO, "run")


def three_and_one(found: list[dict[str, Any]]) -> None:
    names = ("rank", "local_rank", "nproc_per_node", "node_rank")
    places = [tuple(fact[name] for name in names) for fact in found]
    assert places == [(0, 0, 3, 0), (1, 1, 3, 0), (2, 2, 3, 0), (3, 0, 1, 1)]
    assert {(fact["world_size"], fact["nnodes"]) for fact in found} == {(4, 2)}
    assert [fact["ranks"] for fact in found] == [[0, 1, 2, 3]] * 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "words",
    [
        ["srun", "--nodes=2", "--ntasks=4", sys.executable],  # by its variables alone
        [*RUN, "--launcher", "slurm", "--hosts", "n1:3,n2:1"],
    ],
)
def test_slurm_on_nodes_of_different_size(slurm: dict[str, str], words: list[str]) -> None:
    done = run([*words, JOB, "facts", "gloo"], **slurm)
    assert done.code == 0, done.err
    three_and_one(done.facts())


def test_the_batch_script_runs(slurm: dict[str, str], tmp_path: Path) -> None:
    words = [*RUN, "--launcher", "slurm", "--nnodes", "2", "--nproc-per-node", "2"]
    printed = run([*words, "--print", JOB, "facts", "gloo"], **slurm)
    assert printed.code == 0, printed.err
    file = tmp_path / "job.sh"
    file.write_text(printed.out)
    done = run(["sbatch", "--wait", f"--output={tmp_path}/out", str(file)], **slurm)
    text = (tmp_path / "out").read_text()
    assert done.code == 0, text
    found = Done(0, text, "", 0.0).facts()
    assert [(fact["rank"], fact["node_rank"]) for fact in found] == [(0, 0), (1, 0), (2, 1), (3, 1)]


@pytest.mark.parametrize(("launcher", "is_seated"), [(TORCHRUN, True), (RUN, True), (RUN, False)])
def test_two_hosts_of_different_size(
    hosts: Hosts, launcher: tuple[str, ...], is_seated: bool
) -> None:
    where = ["--nnodes", "2", "--master-addr", hosts.addresses[0], "--master-port", "29518"]
    words = []
    for i, n in enumerate((3, 1)):
        seat = ["--node-rank", str(i)] if is_seated else []
        words.append([*launcher, *where, *seat, f"--nproc-per-node={n}", JOB, "facts", "gloo"])
    done = on_both(hosts, words)
    found = done[0].facts() + done[1].facts()
    if is_seated:
        three_and_one(found)
    assert sorted(fact["rank"] for fact in found) == [0, 1, 2, 3]
    assert sorted(fact["nproc_per_node"] for fact in found) == [1, 3, 3, 3]
    assert [fact["nnodes"] for fact in found] == [2] * 4


@pytest.mark.parametrize(
    ("rank", "address"),
    [("1", "127.0.0.1"), ("0", "no-such-host.invalid"), ("1", "no-such-host.invalid")],
)
def test_a_master_that_cannot_be_reached_is_named_in_time(rank: str, address: str) -> None:
    where = ["--nnodes", "2", "--node-rank", rank, "--master-addr", address]
    port = str(free_port())
    done = run([*RUN, *where, "--master-port", port, "--timeout", "1", JOB, "facts"])
    assert done.code == 1
    said = f"node {rank} of 2 couldn't reach node 0 at {address}:{port} in 1 s ([Errno "
    assert said in done.err
    assert "Traceback" not in done.err


def test_a_master_whose_name_is_known_later_is_met(hosts: Hosts) -> None:
    """As in a Job of Kubernetes, whose pods start before DNS knows the first one."""
    where = ["--nnodes", "2", "--master-addr", "leader", "--master-port", "29520"]
    where += ["--nproc-per-node", "1"]
    words = [[*RUN, *where, "--node-rank", str(i), JOB, "facts"] for i in (0, 1)]
    with on_hosts(hosts, words) as jobs:
        late = run(hosts.on(1, [*RUN, *where, "--node-rank", "1", "--timeout", "1", JOB, "facts"]))
        assert "couldn't reach node 0 at leader:29520 in 1 s" in late.err
        assert [job.process.poll() for job in jobs] == [None, None]  # they still try
        with known(hosts.files, lambda text: f"{text}{hosts.addresses[0]} leader\n"):
            found = [ended_well(job).facts() for job in jobs]
    assert [[fact["rank"] for fact in facts] for facts in found] == [[0], [1]]


@pytest.mark.parametrize(
    ("name", "mode", "code"),
    [
        ("processes", "kill-once", 0),
        ("torchrun", "raise-once", 0),
        ("processes", "kill", 128 + signal.SIGKILL),
        ("torchrun", "kill", 128 + signal.SIGKILL),
    ],
)
def test_a_failed_rank_is_started_again_once(name: str, mode: str, code: int) -> None:
    words = [*RUN, "--launcher", name, "--nproc-per-node", "2", "--max-restarts", "1"]
    done = run([*words, JOB, mode, "gloo"])
    assert done.code == code, done.err
    assert done.out.count("FACTS") == 4
    assert done.out.count("DONE") == (0 if code else 2)
    reports = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(reports) == (2 if code else 1)
    assert all(line.startswith("error: rank 1 of 2") for line in reports)
    assert done.err.count("\nrestart 1 of 1\n") == 1
    # Rank 0 may print its own error, of rank 1's death, before it is ended.
    others = done.err.count("Traceback") - done.err.count("[0] Traceback")
    assert others == (2 if mode == "raise-once" else 0)  # a cause has one
    assert "torch/distributed" not in done.err


MODELS = {"": "serial", "gloo": "native-dist", "mpi4py": "mpi-dist", "horovod": "horovod-dist"}


@pytest.mark.parametrize(
    ("needs", "words", "backend"),
    [
        ("", [*TORCHRUN, "--standalone", "--nproc-per-node=2"], "gloo"),
        *(("mpi", ["mpirun", "-n", "2", sys.executable], backend) for backend in [*MODELS][1:]),
        ("", ["horovodrun", "--gloo", "-np", "2", sys.executable], "horovod"),
        ("slurm", ["srun", "--nodes=2", "--ntasks=2", sys.executable], "gloo"),
        ("", [sys.executable], ""),
        *(
            ("" if name in LAUNCHERS[:2] else name, [*RUN, "--launcher", name, "-n", "2"], "gloo")
            for name in LAUNCHERS
        ),
    ],
)
def test_digits_unchanged_however_started(
    needs: str, words: list[str], backend: str, request: pytest.FixtureRequest
) -> None:
    variables = (request.getfixturevalue(needs) if needs else None) or {}
    if words[0] == "mpirun":
        variables = MPI
    elif words[0] == "horovodrun" and shutil.which("horovodrun") is None:
        require("horovod", "horovodrun isn't installed")
    if backend in ("mpi4py", "horovod"):
        done = run([sys.executable, "-c", f"import {backend}"])
        require(backend, None if done.code == 0 else f"{backend} isn't installed")
    script = [DIGITS, "--epochs", "2", *(["--backend", backend] if backend else [])]
    done = run([*words, *script], **variables)
    assert done.code == 0, done.err
    assert f"({MODELS[backend]})" in done.out
    assert all(f"rank {rank} on" in done.out for rank in range(2 if backend else 0))
    assert learnt(done.out) == learnt_alone("2")


def test_a_node_that_is_interrupted_leaves_nobody(hosts: Hosts) -> None:
    where = ["--nnodes", "2", "--master-addr", hosts.addresses[0], "--master-port", "29520"]
    words = [*RUN, *where, "--nproc-per-node", "1", "--node-rank"]
    with on_hosts(hosts, [[*words, str(i), JOB, "wait", "gloo"] for i in (0, 1)]) as jobs:
        for job in jobs:
            job.wait_for("READY", 1)
        for job in jobs:
            assert job.end(signal.SIGINT, 2 * GONE_S) == 128 + signal.SIGINT
            nobody_is_left(job.mark)
