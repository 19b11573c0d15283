"""What a person reads when a job of `spawn` fails, hangs or is interrupted."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import unisono
from tests.support.processes import python
from unisono.errors import CollectiveMismatchError, WorkerFailedError

FOLDED = re.compile(r"^  \.\.\. \d+ frames of unisono, UNISONO_TRACEBACK=full shows them$", re.M)
LIMIT_S = 100.0
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


def failure(fn: Callable[[int], None], backend: str = "gloo") -> str:
    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn(backend, fn, nproc_per_node=3)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "threads"])
def test_a_failure_says_first_who_and_what_and_where(backend: str) -> None:
    def fn(local_rank: int) -> None:
        if local_rank == 1:
            int("oops")
        unisono.barrier()

    first, second, *rest = failure(fn, backend).splitlines()
    assert first == "rank 1 of 3 raised ValueError: invalid literal for int() with base 10: 'oops'"
    assert re.fullmatch(r"  at \S*test_error_texts\.py:\d+, in fn", second)
    assert rest[1] == "Traceback (most recent call last):"


def test_who_never_came_is_named_first_with_its_line() -> None:
    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 2:
            signal.sigtimedwait([], 60)
        with unisono.deadline(1):
            unisono.barrier()

    text = failure(fn)
    first, second, *_ = text.splitlines()
    place = r"\S*test_error_texts\.py:\d+"
    said = rf"rank 2 never came to barrier: it is at {place} \(signal\.sigtimedwait\(\[\], 60\)\)"
    assert re.fullmatch(said, first)
    assert re.fullmatch(
        rf"  rank [01] of 3 raised CollectiveTimeoutError at {place}, in fn", second
    )
    assert len(FOLDED.findall(text)) == 1
    assert "round" not in text
    assert "another call" not in text


def test_who_called_something_else_is_named_first() -> None:
    def fn(local_rank: int) -> None:
        if local_rank == 1:
            unisono.all_gather("x")
        unisono.barrier()

    with pytest.raises(WorkerFailedError) as caught:
        unisono.spawn("gloo", fn, nproc_per_node=3)
    assert isinstance(caught.value.__cause__, CollectiveMismatchError)
    pattern = r"rank 1 called all_gather at \S+:\d+, the others barrier at \S+:\d+:"
    assert re.fullmatch(pattern, str(caught.value).splitlines()[0])


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


@pytest.mark.skipif(sys.platform != "linux", reason="processes are named on Linux alone")
def test_processes_are_named_after_their_ranks() -> None:
    def fn(local_rank: int) -> tuple[str, str]:
        return Path("/proc/self/comm").read_text(), Path("/proc/self/cmdline").read_text()

    found = unisono.spawn("gloo", fn, nproc_per_node=2)
    assert [comm for comm, _ in found] == ["rank 0 of 2\n", "rank 1 of 2\n"]
    program = Path(sys.argv[0]).name
    for rank, (_, line) in enumerate(found):
        assert line.rstrip("\0") == f"unisono rank {rank} of 2: {program}"


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
