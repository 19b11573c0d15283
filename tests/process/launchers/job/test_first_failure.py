"""What a failing replica does to its job: its own error within seconds, and nobody left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import unisono
from tests.support.faults import Locked, Mute
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


@pytest.mark.parametrize("backend", MODELS)
def test_the_error_of_a_replica_arrives_with_its_own_traceback(backend: str) -> None:
    def the_culprit() -> NoReturn:
        raise ArithmeticError("mine")

    error = spawn_to_fail(backend, the_culprit)
    assert isinstance(error.__cause__, ArithmeticError)
    assert "in the_culprit" in error.traceback
    assert error.traceback in str(error)
    assert "ArithmeticError: mine" in str(error)
    assert "closed by peer" not in str(error)
    assert "unisono/launchers/" not in error.traceback
    assert (error.exit_code, error.signal) == (None, None)


def kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


EARLY = "exit code {} before its work was done"
PROCESS_ENDS: dict[str, tuple[Callable[[], Any], int | None, str | None, str]] = {
    "os._exit(3)": (lambda: os._exit(3), 3, None, EARLY.format(3)),
    "os._exit(0)": (lambda: os._exit(0), 0, None, EARLY.format(0)),
    "SIGKILL": (kill(signal.SIGKILL), None, "SIGKILL", "ended by SIGKILL"),
    "SIGSEGV": (kill(signal.SIGSEGV), None, "SIGSEGV", "ended by SIGSEGV"),
}
ENDS: dict[str, tuple[Callable[[], Any], int | None, str | None, str]] = {
    "sys.exit('text')": (lambda: sys.exit("text"), 1, None, "SystemExit: text"),
    "sys.exit(0)": (lambda: sys.exit(0), 0, None, "SystemExit: 0"),
    "sys.exit(None)": (lambda: sys.exit(None), 0, None, "SystemExit"),
    "sys.exit(7)": (lambda: sys.exit(7), 7, None, "SystemExit: 7"),
    "Ctrl-C": (interrupt, None, None, "rank 1 of 2 raised KeyboardInterrupt"),
}


@pytest.mark.parametrize(
    ("backend", "end"), [*(("gloo", end) for end in [*PROCESS_ENDS, *ENDS]),
                         *(("threads", end) for end in ENDS)]
)  # fmt: skip
def test_an_early_end_is_a_failure_that_says_how(backend: str, end: str) -> None:
    do, exit_code, ended_by, text = {**PROCESS_ENDS, **ENDS}[end]
    error = spawn_to_fail(backend, do)
    assert (error.exit_code, error.signal) == (exit_code, ended_by)
    assert text in str(error)


@pytest.mark.parametrize("backend", MODELS)
@pytest.mark.parametrize("way", ["all", "group", "recv"])
def test_a_replica_that_returns_early_is_missed_at_once(backend: str, way: str) -> None:
    def fn(local_rank: int) -> None:
        group = unisono.new_group([0, 1])
        if local_rank == 1:
            return
        if way == "recv":
            unisono.recv(src=1)
        else:
            unisono.all_reduce(1, group=group if way == "group" else None)

    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(backend, fn, nproc_per_node=2)
    assert isinstance(caught.value.__cause__, PeerFailedError)
    assert "rank 1" in str(caught.value.__cause__)


class Picky(Exception):
    """An exception that pickle can't make again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


@pytest.mark.parametrize("backend", MODELS)
@pytest.mark.parametrize("make", [Locked, Mute, lambda: Picky("", "")])
def test_an_exception_that_cannot_travel_is_told_as_text(
    backend: str, make: Callable[[], Exception]
) -> None:
    def the_culprit() -> NoReturn:
        raise make()

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
        error = spawn_to_fail("gloo", leave_a_child, pipe.path)
        os.kill(int(pipe.read(1)[0]), signal.SIGKILL)
    assert error.exit_code == 3


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
    assert not gone([helper], 20)
    assert unisono.spawn("gloo", lambda rank: rank, nproc_per_node=2) == [0, 1]
