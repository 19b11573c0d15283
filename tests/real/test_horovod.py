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
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.at_a_glance import check_in_child
from tests.support.coming_from import PYTHON, jobs_of, lines_of, ours, theirs
from tests.support.hangs import VARIABLES
from tests.support.launched import with_model
from tests.support.processes import MARK, SOURCES, marked
from tests.support.requirements import require, require_backend
from tests.support.tops import (
    check,
    check_end,
    ends_on,
    few_on,
    job_of_processes,
    told,
)
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    LaunchError,
    PayloadError,
    UnsupportedOperation,
    WorkerFailedError,
)
from unisono.model.reduction import ReduceOp
from unisono.topology import EVERYBODY, LaunchPlan, RankInfo

JOB = Path(__file__).with_name("horovod_job.py")
GONE_WITHIN_S = 2.0
FAST = "exchange,asynchronous,mismatch,late,large,adopt,again,gone"
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


def run_job(command: list[str], parts: str, size: int, limit_s: float = 240) -> None:
    """Run parts of the job under a launcher, and see them pass on every rank."""
    environ = {**os.environ, "PYTHONPATH": SOURCES}
    environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS", None)
    process = subprocess.Popen(
        [*command, sys.executable, str(JOB), parts],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    passed = set(re.findall(r"rank (\d+) passed (\w+)", said))
    wanted = {(str(rank), part) for rank in range(size) for part in parts.split(",")}
    assert passed == wanted, said[-6000:]
    assert process.returncode == 0, said[-6000:]


def horovodrun(size: int, *options: str) -> list[str]:
    words = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache"]
    return [*words, "-np", str(size), *options]


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_under_horovodrun(size: int) -> None:
    run_job(horovodrun(size), "collectives", size)


@pytest.mark.parametrize("size", [2, 3])
def test_contexts_and_errors_under_horovodrun(size: int) -> None:
    run_job(horovodrun(size), f"again,absent,facade,{FAST}", size)


def test_names_do_not_depend_on_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = tmp_path / "timeline.json"
    monkeypatch.setitem(os.environ, "HOROVOD_TIMELINE", str(timeline))
    monkeypatch.setitem(os.environ, "UNISONO_SHARED_BYTES", "0")  # so that Horovod has tensors
    run_job(horovodrun(2), "names", 2)
    names = set(re.findall(r'"name": "([^"]*unisono[^"]*)"', timeline.read_text()))
    # The barrier is the last one before the end, which Horovod doesn't always write down.
    assert names - {f"allreduce.unisono.{EVERYBODY}.barrier"} == {
        f"allreduce.unisono.{EVERYBODY}",
        f"allgather.unisono.{EVERYBODY}",
        f"alltoall.unisono.{EVERYBODY}",  # by which the ranks prove who they are
    }


@pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
def test_a_rank_that_raises_ends_the_job(launcher: str, request: pytest.FixtureRequest) -> None:
    command = (
        horovodrun(3)
        if launcher == "horovodrun"
        else [*request.getfixturevalue("mpirun"), "-np", "3"]
    )
    mark = uuid.uuid4().hex
    ended = subprocess.run(
        [*command, sys.executable, str(JOB), "fail"],
        env={**os.environ, "PYTHONPATH": SOURCES, MARK: mark},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    end = time.time()
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    raised = re.search(r"ValueError: the original at ([\d.]+)", said)
    assert raised is not None, said
    assert end - float(raised[1]) < 30, said  # seconds; 2 on a machine that is idle
    assert not marked(mark, 5)


def test_nodes_of_different_size() -> None:
    run_job(horovodrun(3, "-H", "localhost:1,127.0.0.1:2"), "nodes", 3)


def test_every_collective_under_mpirun(mpirun: list[str]) -> None:
    run_job([*mpirun, "-np", "2"], "collectives,mpi_again", 2)


def test_contexts_and_errors_under_mpirun(mpirun: list[str]) -> None:
    run_job([*mpirun, "-np", "2"], f"mpi4py,{FAST}", 2)


def test_adopts_under_mpirun(mpirun: list[str]) -> None:
    run_job([*mpirun, "-np", "2"], "adopt", 2)


def test_alone_where_there_should_be_peers() -> None:
    run_job([], "alone", 1)


def launch(entry: Callable[[Any], Any], size: int = 2, **options: Any) -> list[Any]:
    """Launch with a model in each replica."""
    return launch_as(entry, LaunchPlan(size), **options)


def launch_as(entry: Callable[[Any], Any], plan: LaunchPlan, **options: Any) -> list[Any]:
    from unisono.launchers.horovod import functions
    from unisono.models.horovod import context
    from unisono.models.horovod.model import HorovodModel

    timeout = options.pop("timeout", None)
    limit_s = context.seconds(timeout)
    of_model = {} if timeout is None else {"timeout": timeout}
    run = partial(with_model, HorovodModel, "horovod", entry, of_model)
    return functions.launch(run, plan, stop_limit_s=limit_s, **options)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("size", [1, 3])
def test_launch_gives_results_by_rank(size: int) -> None:
    offset = 10

    def entry(model: Any) -> tuple[Any, ...]:
        one = torch.tensor(model.topology.rank + offset)
        total = model.all_reduce(one.clone(), ReduceOp.SUM)
        last = model.new_group((model.topology.world_size - 1,))
        return model.topology, total.item(), model.all_gather(one).tolist(), last.ranks

    ranks = range(size)
    for rank, (topology, total, gathered, last) in enumerate(launch(entry, size)):
        assert (topology.rank, topology.world_size, topology.local_rank) == (rank, size, rank)
        assert (topology.local_world_size, topology.node_rank, topology.nnodes) == (size, 0, 1)
        assert total == sum(offset + r for r in ranks)
        assert gathered == [offset + r for r in ranks]
        assert last == (size - 1,)


@pytest.mark.usefixtures("nothing_left")
def test_launch_prints_what_replicas_print(capfd: pytest.CaptureFixture[str]) -> None:
    def entry(info: RankInfo) -> None:
        sys.stdout.write(f"out of {info.rank}\n")
        sys.stderr.write(f"err of {info.rank}\n")

    from unisono.launchers.horovod.functions import launch

    launch(entry, LaunchPlan(2))
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == ["out of 0", "out of 1"]
    assert {"err of 0", "err of 1"} <= set(said.err.splitlines())


@pytest.mark.usefixtures("nothing_left")
def test_spawn_through_the_facade() -> None:
    def replica(local_rank: int, base: int) -> tuple[Any, ...]:
        idist = importlib.import_module("unisono")
        others: list[int] = []
        other = threading.Thread(target=lambda: others.append(idist.get_rank()))
        other.start()
        other.join()
        return (
            idist.model_name(),
            idist.get_rank(),
            idist.all_reduce(base + local_rank),
            idist.all_gather("é" * local_rank),
            idist.all_reduce(torch.ones(3, dtype=torch.float16), "AVERAGE").tolist(),
            idist.broadcast({"a": local_rank}, src=1),
            others,
        )

    ours = ("horovod-dist", 7, ["", "é"], [1.0] * 3, {"a": 1})
    for rank, found in enumerate(unisono.spawn("horovod", replica, (3,), nproc_per_node=2)):
        assert found == (ours[0], rank, *ours[1:], [rank])


def raising(_model: Any) -> None:
    raise ValueError(repr(time.time()))


def ended_by(number: int) -> Callable[[Any], None]:
    def end(model: Any) -> None:
        sys.stderr.write(f"at {time.time()!r} ends {model.topology.rank}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), number)

    return end


def leaving_with(code: int) -> Callable[[Any], None]:
    def leave(model: Any) -> None:
        sys.stderr.write(f"at {time.time()!r} ends {model.topology.rank}\n")
        sys.stderr.flush()
        os._exit(code)

    return leave


FAILURES: list[tuple[Callable[[Any], None], dict[str, object]]] = [
    (raising, {"exit_code": None, "signal": None}),
    (ended_by(signal.SIGKILL), {"exit_code": None, "signal": "SIGKILL"}),
    (leaving_with(3), {"exit_code": 3, "signal": None}),
    (leaving_with(0), {"exit_code": 0, "signal": None}),
]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(("fail", "said"), FAILURES, ids=["raise", "kill", "exit 3", "exit 0"])
def test_launch_names_the_rank_that_failed_first(
    fail: Callable[[Any], None],
    said: dict[str, object],
    bad: int,
    has_groups: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def entry(model: Any) -> None:
        if has_groups:  # Horovod aborts processes whose peer is lost while there are groups
            model.new_group((0, 1))
        for number in range(1_000_000):
            model.all_reduce(torch.ones(2), ReduceOp.SUM)
            if number == 5 and model.topology.rank == bad:
                fail(model)

    with pytest.raises(WorkerFailedError) as caught:
        launch(entry, 3)
    end = time.time()
    error = caught.value
    assert error.rank == bad, error
    assert {name: getattr(error, name) for name in said} == said
    if fail is raising:
        assert "ValueError" in error.traceback
        assert isinstance(error.__cause__, ValueError)
        begin = float(str(error.__cause__))
    else:
        at = re.search(r"at ([\d.]+) ends", capfd.readouterr().err)
        assert at is not None
        begin = float(at[1])
    assert end - begin < 20  # seconds; 2 on a machine that is idle


@pytest.mark.usefixtures("nothing_left")
def test_launch_relays_a_mismatch() -> None:
    def entry(model: Any) -> None:
        model.all_reduce(torch.ones(2 + model.topology.rank), ReduceOp.SUM)

    with pytest.raises(WorkerFailedError, match="Mismatched") as caught:
        launch(entry)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)


@pytest.mark.usefixtures("nothing_left")
def test_launch_with_a_timeout() -> None:
    # The timeout is that of the set-up too, which takes seconds on a busy machine.
    def entry(model: Any) -> None:
        if model.topology.rank == 0:
            model.all_reduce(torch.ones(1), ReduceOp.SUM)
        time.sleep(600)

    with pytest.raises(WorkerFailedError, match="timed out after 10 s") as caught:
        launch(entry, timeout=timedelta(seconds=10))
    assert caught.value.rank == 0


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
        (LaunchPlan(1), {"hosts": "localhost"}),
        (LaunchPlan(1), {"hosts": "localhost:0"}),
        (LaunchPlan(1), {"hosts": "localhost:1,localhost:1"}),
        (LaunchPlan(1), {"hosts": "localhost:2"}),
        (LaunchPlan(1, nnodes=3), {"hosts": "localhost:1,127.0.0.1:1"}),
        (LaunchPlan(1), {"timeout": 5}),
        (LaunchPlan(1), {"timeout": timedelta(0)}),
    ],
)
def test_misuse_is_refused_before_anything_starts(
    plan: LaunchPlan, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ArgumentError):
        launch_as(lambda _: None, plan, **options)


@pytest.mark.usefixtures("nothing_left")
def test_hosts_that_do_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    begin = time.monotonic()
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid"):
        launch(lambda _: None, 1, hosts="localhost:1,no-such-host.invalid:1")
    assert time.monotonic() - begin < 8


@pytest.mark.usefixtures("nothing_left")
def test_a_job_of_one_host_has_no_secret_in_its_arguments() -> None:
    for words in launch(lambda _: sys.orig_argv, 2):
        link = re.search(r"join\('(.*)'\)", words[-1])
        assert link, words
        where, token, *_ = json.loads(link[1])
        assert token == ""
        assert where.endswith("/link")  # in a folder of mode 0700


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
        if model.topology.rank == 2:
            raise ValueError("the original")
        model.exchange(b"")

    with pytest.raises(WorkerFailedError, match="the original") as caught:
        launch(fail, 2, hosts=hosts)
    assert caught.value.rank == 2


PARENT = """
from unisono.launchers.horovod.functions import launch
from unisono.models.horovod.model import HorovodModel
from unisono.topology import LaunchPlan
def entry(info):
    model = HorovodModel.initialize("horovod", info)
    model.exchange(b"")
    print("up", flush=True)
    while True:
        model.exchange(b"")
if __name__ == "__main__":
    launch(entry, LaunchPlan(2))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_replica_outlives_its_parent(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    mark = uuid.uuid4().hex
    environ = {**os.environ, "PYTHONPATH": SOURCES, MARK: mark}
    environ["TMPDIR"] = str(tmp_path)
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        parent.send_signal(number)
        parent.wait(15)
    assert not marked(mark, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["parent.py"]


SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
# What lies in place of the C++ part, what its build noted, what the refusal says, and whether it
# is known without an import.
BROKEN: dict[str, tuple[str | None, str, str, bool]] = {
    "missing": (None, torch.__version__, "without its C[+][+] part.*HOROVOD_WITH_PYTORCH=1", True),
    "built for another Python": (".cpython-27m.so", torch.__version__, "another Python", True),
    "built for another torch": (SUFFIX, "1.5.0", "torch 1[.]5[.]0, but this is torch", True),
    "no library": (SUFFIX, torch.__version__, "mpi_lib_v2", False),
}
ASK = """
import sys
import unisono
from unisono.errors import BackendUnavailableError
assert ("horovod" in unisono.available_backends()) != {is_known}
assert not [name for name in sys.modules if name.partition(".")[0] == "horovod"]
for call in (unisono.initialize, lambda name: unisono.spawn(name, print)):
    try:
        call("horovod")
    except BackendUnavailableError as error:
        assert isinstance(error.__cause__, (ImportError, type(None))), error.__cause__
        assert (error.__cause__ is None) == {is_known}
        print("refused:", error)
unisono.initialize("gloo")
print("gloo:", unisono.all_reduce(1))
unisono.finalize()
"""


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_installation_says_so(how: str, tmp_path: Path) -> None:
    suffix, noted, sign, is_known = BROKEN[how]
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.submodule_search_locations
    copy = tmp_path / "horovod"
    shutil.copytree(spec.submodule_search_locations[0], copy, ignore=shutil.ignore_patterns("*.so"))
    (copy / "metadata.json").write_text(json.dumps({"pytorch": noted}))
    if suffix is not None:
        (copy / "torch" / f"mpi_lib_v2{suffix}").write_bytes(b"\x7fELF, but no library")
    said = subprocess.run(
        [sys.executable, "-c", ASK.format(is_known=is_known)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCES}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert len(re.findall(f"refused: .*{sign}", said.stdout)) == 2, said.stdout
    assert "gloo: 1" in said.stdout


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("options", [{"use_gloo": True, "verbose": 1}, {"hosts": "localhost:2"}])
def test_options_of_horovods_own_launcher_are_taken(options: dict[str, Any]) -> None:
    assert unisono.spawn("horovod", _adds, nproc_per_node=2, **options) == [2, 2]


def _adds(local_rank: int) -> int:
    return unisono.all_reduce(1)


def test_what_it_lacks_is_undeclared() -> None:
    from unisono.models.horovod.model import HorovodModel

    assert HorovodModel.capabilities == {"groups"}
    assert HorovodModel.why_unavailable("horovod") is None

    def entry(model: Any) -> None:
        with pytest.raises(UnsupportedOperation, match="send"):
            model.send(torch.ones(1), 0)
        with pytest.raises(UnsupportedOperation, match="recv"):
            model.recv(torch.ones(1), 0)

    assert launch(entry, 1) == [None]


EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


def train(command: list[str], path: Path) -> dict[str, Any]:
    """Run the digits example; gives what its rank 0 wrote."""
    said = subprocess.run(
        [*command, "--json", str(path)],
        env={
            **os.environ,
            "PYTHONPATH": SOURCES,
            "TORCHINDUCTOR_CACHE_DIR": str(path.parent),  # torch makes it as soon as an SGD is made
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples aren't here")
def test_the_digits_are_learnt_as_on_gloo(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path, script = tmp_path / "result.json", [sys.executable, str(EXAMPLE)]
    pair = ["--nproc-per-node", "2"]
    on_gloo = train([*script, "--backend", "gloo", *pair], path)
    wanted = torch.tensor(on_gloo["parameters"])
    for command in (
        [*script, "--backend", "horovod", *pair],
        [*horovodrun(2), *script, "--backend", "horovod"],
    ):
        found = train(command, path)
        assert (found["model"], found["world_size"]) == ("horovod-dist", 2)
        assert found["checksums"][0] == found["checksums"][1]
        torch.testing.assert_close(torch.tensor(found["parameters"]), wanted, rtol=0, atol=1e-5)
        assert found["accuracy"] == on_gloo["accuracy"] > 0.95


@pytest.mark.parametrize("job", jobs_of("horovod"))
def test_a_program_of_horovod_and_ours_print_the_same(job: str, tmp_path: Path) -> None:
    expected = lines_of([*horovodrun(2), sys.executable], theirs("horovod", job), tmp_path)
    for backend in ("horovod", "gloo", "threads"):
        assert lines_of(PYTHON, ours(job, backend, tmp_path), tmp_path) == expected, backend


def test_every_call_of_horovod_at_a_glance_can_be_made() -> None:
    check_in_child("Horovod")


@pytest.mark.usefixtures("own_pages")
@pytest.mark.parametrize("kind", few_on("horovod"))
def test_top_names_the_rank_that_hangs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.get((kind, "horovod"), {}).items():
        monkeypatch.setenv(name, value)
    with job_of_processes(kind, "horovod"):
        check(kind, told())


@pytest.mark.usefixtures("own_pages")
@pytest.mark.parametrize("kind", ends_on("horovod"))
def test_a_job_that_does_not_hang_names_the_rank_as_it_ends(kind: str) -> None:
    check_end(kind, "horovod")
