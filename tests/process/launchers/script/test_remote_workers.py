"""A function in ranks that another library's launcher makes: here one rank, made by small ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.processes import gone
from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers.script.remote_workers import LauncherSpec, run_function
from unisono.launchers.script.script import Script
from unisono.launchers.variables import OF_TORCH, without
from unisono.topology import RankInfo

OF_ONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def one_rank(script: Script, _: ExitStack) -> tuple[list[str], dict[str, str]]:
    return script.rank_argv(), {**without(os.environ, OF_TORCH), **OF_ONE}


@pytest.mark.parametrize(("raised", "code"), [(ValueError("no data"), 1), (SystemExit(7), 7)])
def test_a_failed_function_ends_its_rank_whatever_its_threads_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], raised: BaseException, code: int
) -> None:
    outlived = tmp_path / "outlived"

    def go_on() -> None:
        time.sleep(8)
        outlived.touch()

    def fail(_: RankInfo) -> None:
        threading.Thread(target=go_on).start()
        print("said before", end="")  # noqa: T201 - it must not be lost
        raise raised

    with pytest.raises(WorkerFailedError, match=type(raised).__name__) as caught:
        run_function(fail, Script(()), LauncherSpec("env", 1), one_rank, {})
    assert not outlived.exists()
    assert "in fail" in caught.value.traceback
    assert repr(caught.value.__cause__) == repr(raised)
    assert caught.value.exit_code == (code if code > 1 else None)
    assert "said before" in capfd.readouterr().out


def test_what_a_rank_started_ends_though_its_launcher_kills_all_that_it_finds(
    tmp_path: Path,
) -> None:
    def in_a_shell(script: Script, held: ExitStack) -> tuple[list[str], dict[str, str]]:
        words, variables = one_rank(script, held)
        return ["sh", "-c", '"$@"; exit $?', "sh", *words], variables  # as Horovod starts ranks

    def stay(_: RankInfo) -> None:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "child").write_text(str(child.pid))
        wrapper = psutil.Process(os.getppid())
        for each in wrapper.children():
            if each.pid != os.getpid():
                each.kill()
        wrapper.kill()
        threading.Event().wait()

    with pytest.raises(LaunchError):
        run_function(stay, Script(()), LauncherSpec("mine", 1), in_a_shell, {})
    assert not gone([int((tmp_path / "child").read_text())], 20)


def test_a_rank_that_connects_has_no_word_of_it_in_its_variables() -> None:
    names = run_function(
        lambda _: list(os.environ), Script(()), LauncherSpec("env", 1), one_rank, {}
    )[0]
    assert "UNISONO_LINK" not in names
    assert {"RANK", "OMP_NUM_THREADS"} & {*names} == {"RANK"}  # all cores are one rank's


def test_a_launcher_that_ends_without_ranks_is_an_error() -> None:
    def nobody(*_: object) -> tuple[list[str], dict[str, str]]:
        return ["sh", "-c", "echo not today >&2; exit 3"], dict(os.environ)

    with pytest.raises(
        LaunchError, match=r"mine ended with exit code 3, though ranks \[0\] .*\nnot today"
    ):
        run_function(repr, Script(()), LauncherSpec("mine", 1), nobody, {})


# A launcher of two ranks: the first may fail before the second is started, or is the only one.
TWO = """
import os, subprocess, sys
def start(rank):
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return subprocess.Popen(sys.argv[2:], env={**os.environ, **place, **sizes})
first = start(0)
open(os.environ["AT_WORK"]).read()
if sys.argv[1] == "late":
    second = start(1)
    first.wait()
    second.terminate()
    second.wait()
    sys.exit(1)
first.terminate()
first.wait()
sys.exit(3)
"""


def two_ranks(how: str, fifo: Path) -> Any:
    def prepare(script: Script, held: ExitStack) -> tuple[list[str], dict[str, str]]:
        words, variables = one_rank(script, held)
        return [sys.executable, "-c", TWO, how, *words], {**variables, "AT_WORK": str(fifo)}

    return prepare


def test_a_rank_that_comes_after_the_failure_of_another_is_of_the_same_job(
    tmp_path: Path,
) -> None:
    os.mkfifo(fifo := tmp_path / "at_work")

    def fail(info: RankInfo) -> None:
        if info.rank == 0:
            fifo.write_text("")
            raise ValueError("the first")
        threading.Event().wait()

    spec = LauncherSpec("mine", 2)
    with pytest.raises(WorkerFailedError, match="rank 0 of 2 raised ValueError: the first"):
        run_function(fail, Script(()), spec, two_ranks("late", fifo), {})


def test_a_rank_that_never_came_is_named_and_not_the_one_that_was_ended_for_it(
    tmp_path: Path,
) -> None:
    os.mkfifo(fifo := tmp_path / "at_work")

    def wait(_: RankInfo) -> None:
        fifo.write_text("")
        threading.Event().wait()

    said = r"mine ended with exit code 3, though ranks \[1\] hadn't connected"
    with pytest.raises(LaunchError, match=said):
        run_function(wait, Script(()), LauncherSpec("mine", 2), two_ranks("one", fifo), {})
