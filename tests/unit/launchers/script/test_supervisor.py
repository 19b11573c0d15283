"""What is said of ranks that failed: who is at fault, why, and each failure once."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import pytest

from unisono.cli.run import _finish
from unisono.errors import ArgumentError
from unisono.launchers.job.job import Job
from unisono.launchers.script import supervisor
from unisono.launchers.script.rank.report import Report, encode
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import ScriptOutcome, Supervisor, run_launcher, verdict

LOST = "ConnectionResetError: Connection reset by peer"
FAILED = "ValueError: no data"
SCRIPT = Script(("train.py",))


def report(rank: int = 1, code: int = 1, raised: str = "", words: str = "", **more: Any) -> Report:
    place = "/u/train.py:7, in <module>" if raised else ""
    return Report(rank, 40, "host", 7, code, 0, raised, place, words, rank, 0, **more)


@pytest.mark.parametrize(("code", "name"), [(-11, "SIGSEGV"), (-9, "SIGKILL")])
@pytest.mark.parametrize("last", ["Fatal Python error: Segmentation fault\n", ""])
def test_a_rank_that_a_signal_ended_raised_nothing(code: int, name: str, last: str) -> None:
    found = report(code=code, words=last)
    says = f"rank 1 of 40 (local rank 1, host host, process 7) was ended by {name}"
    assert found.headline == (f"{says}: {last.strip()}" if last else says)
    assert found.text().startswith(f"{says}; it")


def test_a_rank_with_the_terminal_is_blamed_last() -> None:
    terminal, lost = report(0, 1, has_terminal=True), report(2, 1, LOST)
    assert verdict([terminal, report(1, 1, FAILED)]).failed == report(1, 1, FAILED)
    assert verdict([lost, terminal]).failed == terminal
    assert terminal.text().endswith("ended with exit code 1; see its output above")


def test_other_failures_have_a_line_each_up_to_eight(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _finish(verdict([report(rank, 1, FAILED) for rank in range(20)]), SCRIPT)
    lines = capsys.readouterr().err.splitlines()
    also = [line for line in lines if line.startswith("also:")]
    assert lines[0] == "error: rank 0 of 40 raised ValueError: no data"
    assert also[0] == "also: rank 1 of 40 raised ValueError: no data"
    assert also[8:] == ["also: 11 more"]


def test_a_signal_is_said_without_what_nobody_checked(capsys: pytest.CaptureFixture[str]) -> None:
    def launch(*_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGTERM)  # ends nothing: the first one does
            raise ArgumentError("made of the signal")

    outcome = supervisor.run_as_function(SCRIPT, launch)
    assert _finish(outcome, SCRIPT) == 130
    assert capsys.readouterr().err == "interrupted by SIGINT\n"
    _finish(ScriptOutcome(130, report(1, 1, FAILED), signal.SIGINT), SCRIPT)
    said = capsys.readouterr().err
    assert said.startswith("error: rank 1 of 40 raised ValueError: no data\n")
    assert said.endswith("\ninterrupted by SIGINT: all ranks have been ended\n")


LAUNCHER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
sys.stderr.write({said!r})
sys.stderr.flush()
{then}
"""


def launcher_of(report: Report, then: str = "") -> list[str]:
    """Write the command line of a launcher that has a rank's report, and ends well."""
    said = encode(report, SCRIPT.token).decode()
    return [sys.executable, "-c", LAUNCHER.format(said=said, then=then)]


@pytest.mark.parametrize("then", ["", "signal.pause()"])
def test_a_failure_is_one_whatever_the_launcher_says(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_OWN_END_S", 0.1)  # a launcher that pauses doesn't end itself
    failed = report(code=3, words="giving up\n")
    outcome = run_launcher(SCRIPT, launcher_of(failed, then), os.environ)
    assert (outcome.code, outcome.failed) == (3, failed)


@pytest.mark.parametrize(
    ("more", "last"), [({"max_restarts": 1}, "restart 1 of 1"), ({"max_nnodes": 2}, "")]
)
def test_a_failure_that_the_launcher_restarts_after_is_none(
    more: dict[str, Any], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = replace(SCRIPT, **more)
    failed = report(raised=FAILED)
    assert run_launcher(script, launcher_of(failed), os.environ) == ScriptOutcome(0)
    said = f"error: {failed.text()}\n{last}\n"
    assert capsys.readouterr().err == (said if last else "")


def test_a_restart_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(replace(SCRIPT, max_restarts=2))
    job: Job[None] = Job(supervisor, 40)
    peer, failed = report(0, 1, LOST), report(1, 1, FAILED)
    again = replace(failed, attempt=1)
    for each in (peer, failed, again, peer):  # some of the first attempt end late
        supervisor.note(job, each)
    assert supervisor.reports == [again]
    assert capsys.readouterr().err == f"error: {failed.text()}\nrestart 1 of 2\n"


def test_what_the_launcher_says_of_a_reported_rank_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = "E1127 01:56 api.py:1002] failed\nTraceback (most recent call last):\n[0]: 1\n"
    ranks = "[0] a line\n\x1b[36m[0] \x1b[0mTraceback (most recent call last):\n"
    then = f"sys.stderr.write({own + ranks!r}); sys.exit(1)"
    run_launcher(SCRIPT, launcher_of(report(raised=FAILED), then), os.environ)
    assert capsys.readouterr().err == ranks


def test_what_the_launcher_says_of_a_signal_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = "Traceback (most recent call last):\nSignalException: 2\n"
    then = f"atexit.register(sys.stderr.write, {own!r}); os.kill(os.getppid(), 2); signal.pause()"
    text = LAUNCHER.format(said="[0] a line\n", then=f"import atexit, os; {then}")
    outcome = run_launcher(SCRIPT, [sys.executable, "-c", text], os.environ)
    assert outcome.interrupted == signal.SIGINT
    assert capsys.readouterr().err == "[0] a line\n"
