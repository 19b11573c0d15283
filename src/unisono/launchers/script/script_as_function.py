"""Scripts in replicas of a launcher that only knows functions: a plug-in's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unisono.errors import ArgumentError, PeerFailedError, WorkerFailedError
from unisono.launchers.job.failure import exit_code_of
from unisono.launchers.job.output import Pipes, show
from unisono.launchers.job.signals import signals
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import Script, env_for, without_job
from unisono.launchers.script.supervisor import ScriptOutcome, verdict
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

    def __call__(self, info: RankInfo) -> None:
        pipes, reader, report = Pipes(), Reader(self.script.token), None
        environ = {**without_job(os.environ), **self.environ, **env_for(info)}
        process = pipes.start(self.script.rank_argv(os.getpid()), environ, stdout=None)
        while pipes.open:
            for target, line in pipes.read(1.0):
                found = reader.read(line)
                report = found if isinstance(found, Report) else report
                if not found:
                    show(target, line)
        code = process.wait()
        if code != 0:
            is_secondary = report is not None and report.is_secondary
            cause = PeerFailedError("another rank failed") if is_secondary else None
            raise ScriptEndedError(exit_code_of(code), report) from cause


def run(script: Script, launch: Callable[..., Any]) -> ScriptOutcome:
    """Run a script in replicas of any launcher."""
    for name in ("hosts", "max_restarts", "timeout_s", "options"):
        if getattr(script, name):
            raise ArgumentError(f"this launcher does not support --{name.replace('_', '-')}")
    own = {name: os.environ[name] for name in OF_RUN if name in os.environ}
    with signals(is_once=True) as seen:
        try:
            launch(_Rank(script, own), script.plan())
        except BaseException as error:  # it may make anything of what a signal raises
            if not seen:
                return _failure(error, script.world_size)
    if seen:
        return ScriptOutcome(exit_code_of(-seen[0]), interrupted=seen[0], is_ended=False)
    return ScriptOutcome(0)


def _failure(error: BaseException, world_size: int) -> ScriptOutcome:
    """Find the report in what the launcher raised; raise that again where it has none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ScriptEndedError) and cause.report is not None:
            return verdict([cause.report])
        cause = cause.__cause__ or cause.__context__
    if not isinstance(error, WorkerFailedError) or not error.exit_code:
        raise error
    report = Report(error.rank, world_size, "unknown", -1, error.exit_code)
    return verdict([replace(report, words=error.traceback or str(error))])
