"""What a failing replica does to its job: its own error within seconds, and nobody left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import unisono
from tests.support.processes import Pipe, gone, say
from unisono.errors import PayloadError, PeerFailedError, WorkerFailedError

MODELS = ["gloo", "threads"]


def spawn_to_fail(backend: str, fn: Callable[..., Any], *args: Any) -> WorkerFailedError:
    """Let rank 1 fail while rank 0 waits in a collective; give the error."""

    def replica(local_rank: int) -> Any:
        if local_rank == 1:
            return fn(*args)
        return unisono.all_reduce(torch.ones(1))

    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(backend, replica, nproc_per_node=2)
    assert caught.value.rank == 1
    assert "rank 1 of 2" in str(caught.value)
    return caught.value


@pytest.mark.timed
@pytest.mark.parametrize("backend", MODELS)
def test_the_error_of_a_replica_arrives_within_3_s_with_its_own_traceback(backend: str) -> None:
    def the_culprit() -> NoReturn:
        raise ArithmeticError("at", time.monotonic())

    error = spawn_to_fail(backend, the_culprit)
    assert isinstance(error.__cause__, ArithmeticError)
    assert time.monotonic() - error.__cause__.args[1] < 3
    assert "in the_culprit" in error.traceback
    assert error.traceback in str(error)
    assert "ArithmeticError: ('at', " in str(error)
    assert "closed by peer" not in str(error)
    assert "unisono/launchers/" not in error.traceback
    assert (error.exit_code, error.signal) == (None, None)


@pytest.mark.parametrize(
    ("end", "exit_code", "ended_by", "text"),
    [
        (lambda: os._exit(3), 3, None, "exit code 3 before its work was done"),
        (lambda: os._exit(0), 0, None, "exit code 0 before its work was done"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), None, "SIGKILL", "ended by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), None, "SIGSEGV", "ended by SIGSEGV"),
    ],
    ids=["os._exit(3)", "os._exit(0)", "SIGKILL", "SIGSEGV"],
)
def test_a_process_that_ends_early_is_a_failure_that_says_how(
    end: Callable[[], Any], exit_code: int | None, ended_by: str | None, text: str
) -> None:
    error = spawn_to_fail("gloo", end)
    assert (error.exit_code, error.signal) == (exit_code, ended_by)
    assert text in str(error)


@pytest.mark.parametrize("backend", ["gloo", "threads"])
@pytest.mark.parametrize(("code", "exit_code"), [("text", 1), (0, 0), (None, 0), (7, 7)])
def test_an_exit_of_a_replica_is_a_failure(backend: str, code: Any, exit_code: int) -> None:
    error = spawn_to_fail(backend, sys.exit, code)
    assert error.exit_code == exit_code
    assert f"SystemExit: {code}" in str(error) or (code is None and "SystemExit" in str(error))


@pytest.mark.parametrize("backend", MODELS)
def test_an_interrupt_in_a_replica_is_a_failure(backend: str) -> None:
    def interrupt() -> NoReturn:
        raise KeyboardInterrupt

    assert "rank 1 of 2 raised KeyboardInterrupt" in str(spawn_to_fail(backend, interrupt))


@pytest.mark.parametrize("backend", MODELS)
@pytest.mark.parametrize("way", ["all", "group", "recv"])
def test_a_replica_that_returns_early_is_missed_at_once(backend: str, way: str) -> None:
    def fn(local_rank: int) -> None:
        group = unisono.new_group([0, 1])
        if local_rank == 1:
            return
        begin = time.monotonic()
        try:
            if way == "recv":
                unisono.recv(src=1)
            else:
                unisono.all_reduce(1, group=group if way == "group" else None)
        finally:
            assert time.monotonic() - begin < 20

    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(backend, fn, nproc_per_node=2)
    assert isinstance(caught.value.__cause__, PeerFailedError)
    assert "rank 1" in str(caught.value.__cause__)


class Locked(Exception):
    """An exception that can't be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unprintable(Exception):
    """An exception that can't be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Picky(Exception):
    """An exception that pickle can't make again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@pytest.mark.parametrize("backend", MODELS)
@pytest.mark.parametrize("make", [Locked, Unprintable, lambda text: Picky(text, "")])
def test_an_exception_that_cannot_travel_is_told_as_text(
    backend: str, make: Callable[[str], Exception]
) -> None:
    def the_culprit() -> NoReturn:
        raise make("told")

    error = spawn_to_fail(backend, the_culprit)
    assert "in the_culprit" in error.traceback


def test_a_result_that_cannot_travel_is_told_with_its_rank() -> None:
    def fn(local_rank: int) -> Any:
        unisono.barrier()
        return threading.Lock() if local_rank == 1 else None

    with pytest.raises(WorkerFailedError, match="result.*can't be pickled") as caught:
        unisono.spawn("gloo", fn, nproc_per_node=2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, PayloadError)


class Closed:
    """A value that can be pickled, but not made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_a_result_that_cannot_be_read_is_told_with_its_rank() -> None:
    with pytest.raises(WorkerFailedError, match="rank 1 of 2.*can't be unpickled") as caught:
        unisono.spawn("gloo", lambda rank: Closed() if rank else None, nproc_per_node=2)
    assert caught.value.rank == 1


def test_arguments_that_cannot_travel_are_refused_before_anything_starts() -> None:
    with pytest.raises(PayloadError, match="can't be pickled"):
        unisono.spawn("gloo", print, (threading.Lock(),))
    with pytest.raises(WorkerFailedError, match="no number"):
        unisono.spawn("gloo", print, (Closed(),))


@pytest.mark.parametrize("backend", MODELS)
def test_of_two_failures_at_once_one_is_told_whole(backend: str) -> None:
    def fn(local_rank: int) -> None:
        if local_rank == 2:
            unisono.barrier()
        raise ArithmeticError(local_rank)

    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(backend, fn, nproc_per_node=3)
    assert caught.value.rank in (0, 1)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert caught.value.__cause__.args == (caught.value.rank,)


def test_an_end_is_noticed_though_a_child_of_the_replica_lives_on(tmp_path: Path) -> None:
    def leave_a_child(path: str) -> None:
        child = os.fork()
        if child == 0:
            signal.pause()
        say(path, child)
        os._exit(3)

    with Pipe(tmp_path) as pipe:
        started = time.monotonic()
        error = spawn_to_fail("gloo", leave_a_child, pipe.path)
        os.kill(int(pipe.read(1)[0]), signal.SIGKILL)
    assert error.exit_code == 3
    assert time.monotonic() - started < 20


@pytest.mark.timed
def test_the_death_of_the_helper_is_told_and_the_next_job_runs(tmp_path: Path) -> None:
    def fn(local_rank: int, path: str) -> None:
        say(path, os.getppid())
        unisono.barrier()
        signal.pause()

    with Pipe(tmp_path) as pipe:
        job = unisono.spawn("gloo", fn, (pipe.path,), nproc_per_node=2, join=False)
        helper, same = (int(pid) for pid in pipe.read(2))
        assert helper == same
        os.kill(helper, signal.SIGKILL)
        with pytest.raises(WorkerFailedError, match="the process that made it died"):
            job.join()
    assert not gone([helper], 2)
    assert unisono.spawn("gloo", lambda rank: rank, nproc_per_node=2) == [0, 1]
