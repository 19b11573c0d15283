"""Scripts in replicas of a launcher that only knows functions: a plug-in's."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unisono.errors import ArgumentError, UnisonoError, WorkerFailedError
from unisono.launchers.job.failure import exit_code_of
from unisono.launchers.job.signals import signals
from unisono.launchers.job.store import private_folder
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import Script, env_for, without_job
from unisono.launchers.script.supervisor import Outcome, verdict
from unisono.launchers.variables import OF_RUN
from unisono.topology import RankInfo


class ScriptEndedError(SystemExit):
    """Raised in a rank whose script has failed; the exit code is the script's."""

    def __init__(self, code: int, report: Report | None = None) -> None:
        super().__init__(code)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.report)


@dataclass(frozen=True, slots=True)
class _Rank:
    """The script as a function of one replica."""

    script: Script
    environ: Mapping[str, str]
    folder: str

    def __call__(self, info: RankInfo) -> None:
        process = subprocess.Popen(
            self.script.rank_argv(os.getpid()),
            env={**without_job(os.environ), **self.environ, **env_for(info)},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        reader, report = Reader(self.script.token), None
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                answer = reader.read(line)
                if isinstance(answer, Report):
                    report = answer
                elif not answer:
                    os.write(2, line)
        code = process.wait()
        if report is not None and os.path.isdir(self.folder):  # it may be on another host
            Path(self.folder, f"rank-{info.rank}").write_text(json.dumps(asdict(report)))
        if code != 0:
            raise ScriptEndedError(exit_code_of(code), report)


def run(script: Script, launch: Callable[..., Any]) -> Outcome:
    """Run a script in replicas of any launcher."""
    for name in ("hosts", "max_restarts", "timeout_s", "options"):
        if getattr(script, name):
            raise ArgumentError(f"this launcher takes no --{name.replace('_', '-')}")
    own = {name: os.environ[name] for name in OF_RUN if name in os.environ}
    with private_folder() as folder:
        with signals(is_once=True) as seen:
            try:
                launch(_Rank(script, own, folder), script.plan())
                failed = None
            except BaseException as error:  # it may make anything of what a signal raises
                if not seen and not isinstance(error, UnisonoError):
                    raise
                failed = error
        if seen:
            return Outcome(exit_code_of(-seen[0]), interrupted=seen[0], is_ended=False)
        if failed is not None:
            reports = _left_in(Path(folder)) or _carried_by(failed, script.world_size)
            if not reports:
                raise failed
            return verdict(reports)
        reports = _left_in(Path(folder))
    return verdict(reports) if reports else Outcome(0)


def _left_in(folder: Path) -> list[Report]:
    """Read the reports of ranks of this host, in the order of their writing."""
    files = sorted(folder.glob("rank-*"), key=lambda file: file.stat().st_mtime_ns)
    return [Report(**json.loads(file.read_text())) for file in files]


def _carried_by(error: BaseException, world_size: int) -> list[Report]:
    """Find the report in what the launcher raised, which has the rank's own exception as cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ScriptEndedError) and cause.report is not None:
            return [cause.report]
        cause = cause.__cause__
    if isinstance(error, WorkerFailedError) and error.exit_code:
        report = Report(error.rank, world_size, "unknown", -1, error.exit_code)
        return [replace(report, words=error.traceback or str(error))]
    return []
