"""What spawn can run, where, and what comes back."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import unisono
from tests.support import functions
from tests.support.listeners import listeners
from tests.support.processes import Pipe, gone, python, run_python, say, until
from unisono import WorkerPool
from unisono.launchers.job.worker_handles import Workers

PROGRAM = """
import functools, unisono

class Point:
    def __init__(self, x):
        self.x = x

class Wrong(Exception):
    pass

def move(local_rank, point):
    assert type(point) is Point
    return Point(unisono.all_reduce(point.x + local_rank))

def fail(local_rank):
    raise Wrong("here")

@functools.lru_cache(maxsize=8)
def numbers(n):
    return [n]

def cached(local_rank):
    return numbers(local_rank) is numbers(local_rank), numbers.cache_parameters()["maxsize"]

points = unisono.spawn("gloo", move, args=(Point(5),), nproc_per_node=2)
assert all(type(point) is Point for point in points)
try:
    unisono.spawn("gloo", fail)
except unisono.errors.WorkerFailedError as error:
    assert type(error.__cause__) is Wrong
print([point.x for point in points])
print(unisono.spawn("gloo", cached, nproc_per_node=2), unisono.spawn("gloo", numbers))
"""
PRINTED = "[11, 11]\n[(True, 8), (True, 8)] [[0]]"
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.fast
def test_results_come_back_by_rank_with_all_arguments() -> None:
    def fn(local_rank: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return unisono.get_rank(), unisono.get_world_size(), local_rank, args, kwargs

    results = unisono.spawn("gloo", fn, (1, "é"), {"x": None}, nproc_per_node=3)
    assert results == [(rank, 3, rank, (1, "é"), {"x": None}) for rank in range(3)]


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda local_rank: functions.total(local_rank, 5), id="lambda"),
        pytest.param(functions.add_to(5), id="closure"),
        pytest.param(functions.Adder(5).add, id="bound method"),
        pytest.param(functions.Adder(5), id="callable object"),
        pytest.param(functools.partial(functions.total, base=5), id="partial"),
    ],
)
def test_any_callable_can_be_spawned(fn: Callable[..., Any]) -> None:
    assert unisono.spawn("gloo", fn, nproc_per_node=2) == [11, 11]


@pytest.mark.parametrize("how", ["-c", "stdin", "script without a main guard"])
def test_what_main_defines_can_be_spawned_and_comes_back_as_itself(
    how: str, tmp_path: Path
) -> None:
    script = tmp_path / os.fsdecode(b"caf\xe9") / "script.py"  # which isn't UTF-8
    script.parent.mkdir()
    script.write_text(PROGRAM)
    ways = {"-c": ["-c", PROGRAM], "stdin": ["-"], "script without a main guard": [str(script)]}
    assert run_python(*ways[how], text=PROGRAM, cwd=tmp_path) == PRINTED


def test_a_module_that_only_a_later_path_finds_can_be_spawned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unisono.spawn("gloo", functions.total, (1,))
    (tmp_path / "found_later.py").write_text("def fn(local_rank): return __name__, __file__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("found_later")
    assert unisono.spawn("gloo", module.fn) == [("found_later", str(tmp_path / "found_later.py"))]


MODULE = """
import functools

class C:
    pass

def fn(local_rank):
    return C()

@functools.lru_cache(maxsize=8)
def numbers(n):
    return [n]
"""


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_a_module_that_nobody_else_can_import_defines_can_be_spawned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    path = tmp_path / "unimportable.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if is_listed:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for fn in (module.fn, functools.partial(module.fn)):
        (result,) = unisono.spawn("gloo", fn)
        assert type(result) is module.C
    assert unisono.spawn("gloo", module.numbers) == [[0]]


def test_a_cached_function_that_is_local_can_be_spawned() -> None:
    @functools.cache
    def local(local_rank: int) -> int:
        return local_rank

    assert unisono.spawn("gloo", local, nproc_per_node=2) == [0, 1]


def test_the_environment_reaches_the_replicas_and_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(local_rank: int, should_fail: bool) -> dict[str, str]:
        assert not should_fail
        return dict(os.environ)

    monkeypatch.setenv("UNISONO_TEST_GONE", "1")
    monkeypatch.setenv("MASTER_PORT", "a user's own")
    unisono.spawn("gloo", fn, (False,))
    monkeypatch.delenv("UNISONO_TEST_GONE")
    monkeypatch.setenv("UNISONO_TEST_LATER", "1")
    before = dict(os.environ)
    for rank, environ in enumerate(unisono.spawn("gloo", fn, (False,), nproc_per_node=2)):
        assert [environ[name] for name in RENDEZVOUS[:4]] == [
            f"{rank}",
            f"{rank}",
            "2",
            "127.0.0.1",
        ]
        assert int(environ["MASTER_PORT"]) > 0
        assert environ["UNISONO_TEST_LATER"] == "1"
        assert "UNISONO_TEST_GONE" not in environ
    with pytest.raises(unisono.errors.WorkerFailedError):
        unisono.spawn("gloo", fn, (True,), nproc_per_node=2)
    assert dict(os.environ) == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_every_start_method_has_the_directory_and_the_arguments_of_the_parent(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    results = unisono.spawn(
        "gloo",
        lambda local_rank: (unisono.all_gather(local_rank), os.getcwd(), sys.argv),
        nproc_per_node=2,
        start_method=method,
    )
    assert results == [([0, 1], str(tmp_path), ["program", "--flag"])] * 2


FLAGS = """
import sys, unisono

def flags(local_rank):
    return sys.flags[:], sys.warnoptions, sys._xoptions

for way in ({"start_method": "forkserver"}, {"start_method": "spawn"}, {"launcher": "torchrun"}):
    unisono.spawn("gloo", flags, nproc_per_node=2, **way) == [flags(0)] * 2 or sys.exit(f"{way}")
"""


def test_ranks_have_the_flags_of_the_interpreter() -> None:
    done = python("-q", "-X", "dev", "-W", "error::BytesWarning", "-c", FLAGS)
    assert (done.returncode, "ResourceWarning" in done.stderr) == (0, False), done.stderr


def test_output_goes_where_the_parent_writes_now(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(local_rank: int) -> None:
        sys.stdout.write("from python")
        os.write(2, b"from below")

    unisono.spawn("gloo", fn)
    assert capfd.readouterr() == ("from python", "from below")


def test_a_handle_can_be_joined_with_a_deadline_and_again(tmp_path: Path) -> None:
    answer = str(tmp_path / "answer")
    os.mkfifo(answer)
    job = unisono.spawn("gloo", lambda local_rank: Path(answer).read_text(), join=False)
    with pytest.raises(unisono.errors.LaunchError, match=r"ranks \[0\] haven't finished"):
        job.join(timeout=0.05)
    say(answer, "go on")
    assert job.join(timeout=30) == job.join() == ["go on\n"]


def test_a_deadline_holds_while_a_worker_is_stopped_within_its_result(tmp_path: Path) -> None:
    def fn(local_rank: int, path: str) -> bytes:
        say(path, os.getpid())
        return bytes(1 << 24)

    with Pipe(tmp_path) as pipe:
        job = unisono.spawn("gloo", fn, (pipe.path,), join=False)
        pid = int(pipe.read(1)[0])
        assert isinstance(job.ranks, Workers)
        channel = job.ranks.workers[0].channel
        channel.recv(1, socket.MSG_PEEK)  # the kernel doesn't keep the whole of it
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(unisono.errors.LaunchError, match=r"ranks \[0\] haven't finished"):
            job.join(0.5)
        assert time.monotonic() - start < 5
        os.kill(pid, signal.SIGCONT)
        assert job.join(30) == [bytes(1 << 24)]


@pytest.mark.parametrize("method", ["forkserver", "fork"])  # it is the helper's child, or ours
def test_a_worker_that_is_stopped_is_named_at_once_and_no_failure_if_it_goes_on_in_time(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(local_rank: int, path: str) -> str:
        unisono.barrier()
        if local_rank == 1:
            say(path, os.getpid())
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(4)  # longer than the timeout, without a collective
        return "on"

    with Pipe(tmp_path) as pipe:
        options: dict[str, Any] = {"start_method": method, "timeout": 2, "join": False}
        job = unisono.spawn("gloo", fn, (pipe.path,), nproc_per_node=2, **options)
        pid = int(pipe.read(1)[0])
        while "rank 1 of 2 was stopped by SIGSTOP" not in caplog.text:
            with pytest.raises(unisono.errors.LaunchError, match="haven't finished"):
                job.join(0.1)
        os.kill(pid, signal.SIGCONT)
        assert job.join(30) == ["on", "on"]
    assert caplog.text.count("was stopped by") == 1


def _helper(local_rank: int) -> int:
    return os.getppid()


def test_jobs_share_a_helper_and_go_on_when_a_variable_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # ranks of another test may stay with its helper
    there, go_on = tmp_path / "there", tmp_path / "go on"

    def wait(local_rank: int) -> str:
        there.touch()
        until(go_on.exists, 60)
        return "went on"

    with WorkerPool("gloo", 2) as pool:
        old, *_ = pool.run(_helper)
        job = unisono.spawn("gloo", wait, join=False)
        until(there.exists, 60)
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        (new,) = unisono.spawn("gloo", _helper)
        assert new != old
        assert unisono.spawn("gloo", _helper, nproc_per_node=2) == [new, new]
        assert pool.run(_helper) == [old, old]
        go_on.touch()
        assert job.join(30) == ["went on"]
        assert psutil.pid_exists(old)
    assert not gone([old], 5)
    assert psutil.pid_exists(new)


def test_jobs_of_several_threads_run_at_the_same_time_and_outlive_them(tmp_path: Path) -> None:
    def fn(local_rank: int, base: int) -> int:
        until((tmp_path / "go on").exists, 60)
        return functions.total(local_rank, base)

    def start(base: int) -> Any:
        return unisono.spawn("gloo", fn, (base,), nproc_per_node=2, join=False)

    with ThreadPoolExecutor(3) as threads:
        jobs = list(threads.map(start, range(3)))
    (tmp_path / "go on").touch()
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda job: job.join(), jobs))
    assert results == [[2 * base + 1] * 2 for base in range(3)]


def test_a_replica_can_spawn_a_job_of_its_own() -> None:
    def outer(local_rank: int) -> tuple[list[int], int]:
        inner = unisono.spawn("gloo", functions.total, (local_rank,), nproc_per_node=2)
        return inner, unisono.all_reduce(local_rank)

    assert unisono.spawn("gloo", outer, nproc_per_node=2) == [([1, 1], 1), ([3, 3], 1)]


def test_a_process_with_a_context_can_spawn() -> None:
    unisono.initialize("gloo")
    assert unisono.spawn("gloo", functions.total, (5,), nproc_per_node=2) == [11, 11]
    assert (unisono.get_world_size(), unisono.model_name()) == (1, "native-dist")
    assert unisono.spawn("threads", functions.total, (5,), nproc_per_node=2) == [11, 11]
    unisono.finalize()


def test_a_job_needs_no_fixed_port_and_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        (tmp_path / f"there{os.getpid()}").touch()
        until((tmp_path / "go on").exists, 60)

    with contextlib.ExitStack() as stack:
        for port in (2222, 29500, 15000):
            taken = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # somebody else has it, which does as well
                taken.bind(("127.0.0.1", port))
        jobs = [unisono.spawn("gloo", fn, nproc_per_node=2, join=False) for _ in range(2)]
        until(lambda: len(list(tmp_path.iterdir())) == 4, 60)
        found = {address.ip for address in listeners()}
        (tmp_path / "go on").touch()
        for job in jobs:
            job.join()
    assert found
    assert found <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def leave_notes(local_rank: int, folder: Path) -> int:
    owner = Owner()
    inherited = [item for item in vars(weakref.finalize)["_registry"] if item.atexit]
    atexit.register((folder / f"atexit {local_rank}").touch)
    weakref.finalize(owner, (folder / f"finalize {local_rank}").touch)
    globals()["_owner"] = owner  # lives until the end
    return len(inherited)


class Owner:
    """Something that a finalizer can be of."""


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_replica_undoes_at_its_end_what_it_set_up_and_not_what_others_did(
    method: Any, tmp_path: Path
) -> None:
    """Such as a temporary folder of this process, of which it may be a fork."""
    theirs = Owner()
    weakref.finalize(theirs, (tmp_path / "of the parent").touch)
    options: dict[str, Any] = {"nproc_per_node": 2, "start_method": method}
    assert unisono.spawn("gloo", leave_notes, (tmp_path,), **options) == [0, 0]
    notes = [f"{kind} {rank}" for kind in ("atexit", "finalize") for rank in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == notes


def threads(local_rank: int) -> int:
    return torch.get_num_threads()


def test_replicas_share_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert unisono.spawn("gloo", threads, nproc_per_node=2) == [share] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert unisono.spawn("gloo", threads, nproc_per_node=2) == [3] * 2


def test_lines_that_several_ranks_print_begin_with_the_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def speak(local_rank: int) -> None:
        sys.stdout.write("one\ntwo\n")  # in one piece, as other ranks write to the same place
        unisono.print("three", all=True)
        print("without an end", end="", file=sys.stderr)  # noqa: T201

    def lines() -> list[str]:
        return sorted(capfd.readouterr().out.splitlines())

    def said(rank: int) -> list[str]:
        return [f"[rank {rank}] {word}" for word in ("one", "three", "two")]

    unisono.spawn("gloo", speak, nproc_per_node=2)
    assert lines() == said(0) + said(1)
    unisono.spawn("gloo", speak, nproc_per_node=2, prefix_output=False)
    assert lines() == ["[rank 0] three", "[rank 1] three", *["one"] * 2, *["two"] * 2]
    unisono.spawn("gloo", speak)
    assert lines() == ["one", "three", "two"]
    with pytest.raises(unisono.errors.ArgumentError, match="prefix_output='no'"):
        unisono.spawn("gloo", speak, prefix_output="no")  # type: ignore[call-overload]
