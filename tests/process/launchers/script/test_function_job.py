"""A function in ranks that a launcher of programs makes: here one rank, and no launcher."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers.script.function_job import run_function
from unisono.launchers.script.script import Script, without_job
from unisono.launchers.script.supervisor import Outcome, run_launcher
from unisono.topology import RankInfo

OF_ONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def run(script: Script) -> Outcome:
    return run_launcher(script, script.rank_argv(), {**without_job(os.environ), **OF_ONE})


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
        run_function(fail, Script(()), run, {})
    assert not outlived.exists()
    assert "in fail" in caught.value.traceback
    assert repr(caught.value.__cause__) == repr(raised)
    assert f"exit code {code})" in str(caught.value)
    assert "said before" in capfd.readouterr().out


class EndedError(BaseException):
    """What a program's own handler raises."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_signal_that_ended_the_job_has_its_own_handler(
    tmp_path: Path, number: int, goes_on: bool
) -> None:
    seen = []

    def handle(number: int, _: object) -> None:
        seen.append((number, list(tmp_path.iterdir())))
        if not goes_on:
            raise EndedError

    def interrupted(_: Script) -> Outcome:
        assert list(tmp_path.iterdir())
        return Outcome(128 + number, interrupted=number)

    raised: type[BaseException] = LaunchError if goes_on else EndedError
    if number == signal.SIGINT:
        raised = KeyboardInterrupt
    before = signal.signal(number, handle)
    try:
        with pytest.raises(raised):
            run_function(print, Script(()), interrupted, {}, tmp_path)
    finally:
        signal.signal(number, before)
    assert seen == ([] if number == signal.SIGINT else [(number, [])])
    assert list(tmp_path.iterdir()) == []
