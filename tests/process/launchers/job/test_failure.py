"""What a failing replica does to its job, and what a person reads of it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import unisono
from tests.support.faults import FAULTS, kill, throw
from tests.support.processes import Pipe, python, say
from unisono.errors import (
    ArgumentError,
    CollectiveMismatchError,
    PayloadError,
    PeerFailedError,
    WorkerFailedError,
)

MODELS = ["gloo", "threads"]
LIMIT_S = 100.0


def failure(fn: Callable[[int], None], backend: str = "gloo", size: int = 3) -> WorkerFailedError:
    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(backend, fn, nproc_per_node=size)
    return caught.value


def spawn_to_fail(backend: str, fn: Callable[..., Any], *args: Any) -> WorkerFailedError:
    """Let rank 1 fail while rank 0 waits in a collective; give the error."""

    def replica(local_rank: int) -> Any:
        if local_rank == 1:
            return fn(*args)
        return unisono.all_reduce(torch.ones(1))

    error = failure(replica, backend, 2)
    assert error.rank == 1
    assert "rank 1 of 2" in str(error)
    return error


@pytest.mark.parametrize("backend", MODELS)
def test_the_error_of_a_replica_says_first_who_and_what_and_where(backend: str) -> None:
    def the_culprit() -> NoReturn:
        raise ArithmeticError("mine")

    error = spawn_to_fail(backend, the_culprit)
    first, second, *rest = str(error).splitlines()
    assert first == "rank 1 of 2 raised ArithmeticError: mine"
    assert re.fullmatch(r"  at \S*test_failure\.py:\d+, in the_culprit", second)
    assert rest[1] == "Traceback (most recent call last):"
    assert isinstance(error.__cause__, ArithmeticError)
    assert "in the_culprit" in error.traceback
    assert error.traceback in str(error)
    assert "closed by peer" not in str(error)
    assert "unisono/launchers/" not in error.traceback
    assert (error.exit_code, error.signal) == (None, None)


@pytest.mark.parametrize(("fn", "options"), [(int, {"launcher": "mine"}), (threading.Lock(), {})])
def test_an_error_of_the_call_itself_shows_no_frame_below_it(
    fn: Any, options: dict[str, Any]
) -> None:
    with pytest.raises((ArgumentError, PayloadError)) as caught:
        unisono.spawn("gloo", len, args=(fn,), **options)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in frames[1:]] == ["spawn"]


class Picky(Exception):
    """An exception that pickle can't make again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


EARLY = "exit code {} before its work was done"
RAISED = "in throw\n    raise error"  # in the traceback
PROCESS_ENDS: dict[str, tuple[Callable[[], Any], int | None, str | None, str]] = {
    "os._exit(3)": (lambda: os._exit(3), 3, None, EARLY.format(3)),
    "os._exit(0)": (lambda: os._exit(0), 0, None, EARLY.format(0)),
    "SIGKILL": (lambda: kill(signal.SIGKILL), None, "SIGKILL", "ended by SIGKILL"),
    "SIGSEGV": (lambda: kill(signal.SIGSEGV), None, "SIGSEGV", "ended by SIGSEGV"),
}
ENDS: dict[str, tuple[Callable[[], Any], int | None, str | None, str]] = {
    "sys.exit('text')": (lambda: sys.exit("text"), 1, None, "SystemExit: text"),
    "sys.exit(0)": (lambda: sys.exit(0), 0, None, "SystemExit: 0"),
    "sys.exit(None)": (lambda: sys.exit(None), 0, None, "SystemExit"),
    "sys.exit(7)": (lambda: sys.exit(7), 7, None, "SystemExit: 7"),
    "Ctrl-C": (FAULTS["KeyboardInterrupt"].do, None, None, "rank 1 of 2 raised KeyboardInterrupt"),
    "can't be pickled": (FAULTS["exception that can't be pickled"].do, None, None, RAISED),
    "can't be shown": (FAULTS["exception whose __str__ raises"].do, None, None, RAISED),
    "can't be made again": (lambda: throw(Picky("", "")), None, None, RAISED),
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

    cause = failure(fn, backend, 2).__cause__
    assert isinstance(cause, PeerFailedError)
    assert "rank 1" in str(cause)


class Closed:
    """A value that can be pickled, but not made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("result", "text"),
    [(threading.Lock, "result.*can't be pickled"), (Closed, "rank 1 of 2.*can't be unpickled")],
)
def test_a_result_that_cannot_travel_is_told_with_its_rank(
    result: Callable[[], Any], text: str
) -> None:
    with pytest.raises(WorkerFailedError, match=text) as caught:
        unisono.spawn("gloo", lambda rank: result() if rank else None, nproc_per_node=2)
    assert caught.value.rank == 1
    assert result is Closed or isinstance(caught.value.__cause__, PayloadError)


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

    error = failure(fn, backend)
    assert error.rank in (0, 1)
    assert isinstance(error.__cause__, ArithmeticError)
    assert error.__cause__.args == (error.rank,)


def test_an_end_is_noticed_though_a_child_of_the_replica_lives_on(tmp_path: Path) -> None:
    def leave_a_child(path: str) -> None:
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.setsid()  # else it would be ended, too
            os.write(writer, b"x")
            say(path, os.getpid())
            signal.pause()
        os.read(reader, 1)
        os._exit(3)

    with Pipe(tmp_path) as pipe:
        error = spawn_to_fail("gloo", leave_a_child, pipe.path)
        os.kill(int(pipe.read(1)[0]), signal.SIGKILL)
    assert error.exit_code == 3


def test_who_never_came_is_named_first_with_its_line() -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 2:
            signal.sigtimedwait([], 60)
        with unisono.deadline(1):
            unisono.barrier()

    text = str(failure(fn))
    first, second, *_ = text.splitlines()
    place = r"\S*test_failure\.py:\d+"
    said = rf"rank 2 never reached barrier: it is at {place} \(signal\.sigtimedwait\(\[\], 60\)\)"
    assert re.fullmatch(said, first)
    assert re.fullmatch(
        rf"  rank [01] of 3 raised CollectiveTimeoutError at {place}, in fn", second
    )
    assert "/control/" not in text  # frames of ours
    assert "round" not in text
    assert "another call" not in text


def test_who_called_something_else_is_named_first() -> None:
    def fn(local_rank: int) -> None:
        if local_rank == 1:
            unisono.all_gather("x")
        unisono.barrier()

    def in_shape(local_rank: int) -> None:
        unisono.all_reduce(torch.ones(local_rank))

    shape = r"all_reduce SUM of float32\[%d\]"
    first = rf"rank 0 called {shape % 0} at \S+:\d+, rank 1 {shape % 1} at \S+:\d+"
    one = r"rank 1 called all_gather at \S+:\d+, the others barrier at \S+:\d+"
    for called, pattern in ((fn, one), (in_shape, first)):
        error = failure(called)
        assert isinstance(error.__cause__, CollectiveMismatchError)
        assert re.fullmatch(pattern, str(error).splitlines()[0])


def test_a_message_that_nobody_receives_is_told_in_our_words() -> None:
    def fn(local_rank: int) -> None:
        if local_rank == 0:
            unisono.send("x", dst=1)

    text = str(failure(fn, size=2).__cause__)
    assert re.fullmatch(r"rank 0 of 2: send to rank 1: rank 1 .* left after its last \w*", text)


def test_a_failed_assert_says_its_text_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checks.py").write_text(
        "def check(local_rank):\n    total = [local_rank, 4]\n    assert total[1] == 5\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn("threads", importlib.import_module("checks").check)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "rank 0 of 1 raised AssertionError: assert total[1] == 5, where total = [0, 4]"
    assert second == "  at checks.py:3, in check"


INTERRUPTED = """
import signal, sys, unisono

def stay(local_rank):
    signal.alarm(200)  # no rank outlives its test for long, also where pytest was killed
    if local_rank == 0:
        print("READY", flush=True)
    while True:
        unisono.barrier()

if __name__ == "__main__":
    for again in range(2):
        try:
            unisono.spawn("gloo", stay, nproc_per_node=2)
        except KeyboardInterrupt:
            print("HEARD", flush=True)
            if again:
                raise
"""


@pytest.mark.parametrize("traceback", ["", "full"])
def test_ctrl_c_is_two_lines_and_reaches_the_users_code(traceback: str, tmp_path: Path) -> None:
    """It is caught once, which is all that is said, and once it ends the program."""
    script = tmp_path / "train.py"
    script.write_text(INTERRUPTED)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=tmp_path, env={**os.environ, "UNISONO_TRACEBACK": traceback},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        end = threading.Timer(LIMIT_S, process.kill)
        end.start()
        try:
            for line in ("READY", "HEARD", "READY"):
                assert process.stdout.readline().endswith(f"{line}\n")
                if line == "READY":
                    process.send_signal(signal.SIGINT)
            out, err = process.communicate()
        finally:
            end.cancel()
            end.join()
            process.kill()
    assert out == "HEARD\n"
    assert process.returncode == -signal.SIGINT
    if traceback == "full":
        assert err.startswith("Traceback")
        return
    assert err.splitlines() == [
        "spawn at train.py:14 was interrupted, and its replicas have been told to end",
        "KeyboardInterrupt (UNISONO_TRACEBACK=full shows where)",
    ]


def test_a_failed_test_shows_no_line_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import unisono\n"
        "def fail(local_rank):\n    raise ValueError('mine')\n"
        "def test_it():\n    unisono.spawn('threads', fail, nproc_per_node=2)\n"
    )
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), cwd=tmp_path)
    assert "1 failed" in done.stdout
    assert "lifecycle.py" not in done.stdout
    assert "threads.py" not in done.stdout
    assert len(done.stdout.splitlines()) < 60, done.stdout
