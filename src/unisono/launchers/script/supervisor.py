"""Supervision of a script's ranks: their output, the first failure, the end of the job.

The ranks are processes that this one starts, processes of a launcher's program, or replicas of a
launcher that runs only functions, such as a plug-in's.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unisono.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    LaunchError,
    PeerFailedError,
    WorkerFailedError,
)
from unisono.launchers.job.failure import chain, exit_code_of
from unisono.launchers.job.forkserver import Forked
from unisono.launchers.job.job import Job, JobRanks
from unisono.launchers.job.output import Pipes, show
from unisono.launchers.job.process_state import TITLE
from unisono.launchers.job.signals import END_S, OTHERS, TO_END, TO_SAVE, signals
from unisono.launchers.script.forks import fork
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import RANK_WRAPPER, Script, dying_with, env_for
from unisono.launchers.variables import OF_TORCH, run_variables, without
from unisono.plugins import load
from unisono.topology import RankInfo

_POLL_S = 0.2
_OWN_END_S = 2.0  # how long a launcher has to end its job by itself after a failure
_KILL_S = 0.5  # for ranks that kill their programs at once
_DRAIN_S = 2.0  # for the last output of processes that have ended
_OTHERS_S = 1.0  # for other ranks' reports, if a launcher restarts all ranks
_MOST_ALSO = 8  # lines about further ranks
_OF_A_RANK = re.compile(rb"(?:^|\W|\dm)\[(?:\d+|\?)\] ")  # the end of a rank's prefix in a line
_WITH_WRAPPER = "its wrapper process ended so, and the rank with it"
_LAUNCHER = -1  # in place of a rank's number, for a launcher's process


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """The outcome of a job."""

    code: int
    failed: Report | None = None  # of the rank that failed first
    interrupted: int | None = None  # the signal that ended the job
    others: Sequence[Report] = ()  # of ranks that failed by themselves, too
    is_ended: bool = True  # whether all ranks are known to have ended


def run_launcher(
    script: Script,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    end_signal: int = signal.SIGTERM,
    reach: Callable[[int, int], bool] | None = None,
) -> ScriptOutcome:
    """Run a launcher that starts the ranks of a script and ends with this process."""
    supervisor = Supervisor(script, end_signal=end_signal, reach=reach)
    supervisor.start(dying_with(os.getpid(), end_signal, list(arguments)), environ)
    return supervisor.run()


class Programs(JobRanks):
    """Programs that report their failures among the lines that they print."""

    forwarded: Sequence[int] = (*TO_END, *OTHERS)

    def __init__(self, token: str) -> None:
        self.reports: list[Report] = []
        self._reader = Reader(token)

    def cause_order(self, rank: int) -> int:
        """Return the order of a rank that failed without a report."""
        return 1

    def after_signal(self, number: int) -> None:
        """Do nothing, as the outcome reports the signal."""

    def note(self, job: Job[Any], report: Report) -> None:
        """Record a report."""
        self.reports.append(report)
        job.fail(report.rank, report)

    def pass_on(self, job: Job[Any], lines: Iterable[tuple[int, bytes]]) -> None:
        """Print lines, and record the reports among them."""
        for target, line in lines:
            report = self._reader.read(line)
            if isinstance(report, Report):
                self.note(job, report)
            elif not report:
                self.print(job, target, line)

    def print(self, job: Job[Any], target: int, line: bytes) -> None:
        """Print a line."""
        show(target, line)


class Supervisor(Programs):
    """Processes of one job: a launcher, or all ranks of this host."""

    def __init__(
        self,
        script: Script,
        infos: Sequence[RankInfo] = (),
        end_signal: int = signal.SIGINT,
        reach: Callable[[int, int], bool] | None = None,
    ) -> None:
        super().__init__(script.token)
        self.processes: list[subprocess.Popen[bytes] | Forked] = []
        self._script = script
        # With infos there is no launcher: `processes.run` restarts all ranks with a new supervisor.
        self._restarts = script.may_restart and not infos
        self._end_signal = end_signal
        self._reach = reach or self._reach_below
        self._infos = infos
        self._ranks = [info.rank for info in infos] or [_LAUNCHER]
        self._pipes = Pipes()
        self._unsent: list[int] = []  # signals for the next `poll`
        self._signalled: set[Any] = set()  # wrappers that `_reach_below` has signalled
        self._codes: list[int | None] = []  # exit codes before `end` signals any process
        self._attempt = 0  # the failures of earlier attempts have been reported
        self._restart_at = math.inf  # when to print that ranks restart; set by `note`
        self._of_launcher: list[bytes] = []  # lines that may explain a failure without a report

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start a launcher."""
        self.processes.append(self._pipes.start(arguments, environ))

    def start_agent(
        self, server: socket.socket, options: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        """Start torch's agent as a fork; raise OSError if that fails."""
        message = {"agent": options, "environ": dict(environ)}
        with self._pipes.ends() as streams:
            # Its ranks are to be forks, too, and it gives them no descriptor but its stdin.
            self.processes.append(fork(server, message, [server.fileno(), *streams]))

    def add(self, wrapper: subprocess.Popen[bytes]) -> None:
        """Supervise the wrapper of a rank."""
        self.processes.append(wrapper)
        self._pipes.add(wrapper)

    def run(self) -> ScriptOutcome:
        """Print the processes' output until all have ended or one fails, and end the others."""
        grace_s = self._script.grace_s + END_S  # a rank's wrapper ends its program before
        job: Job[None] = Job(self, len(self._ranks), self._ranks, grace_s=grace_s)
        try:
            # `_outcome` finds the reason by itself.
            with contextlib.suppress(LaunchError, CollectiveTimeoutError):
                job.finish()
        finally:
            self.kill()
        found = self._outcome(job)
        # Otherwise the report or the signal explains the end better.
        if found.failed is None and found.interrupted is None:
            for line in self._of_launcher:
                show(2, line)
        return found

    def kill(self) -> None:
        """End all processes at once."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DRAIN_S)
        self._pipes.close()

    def signal(self, number: int) -> None:
        """Send a signal to all ranks, at the next `poll`."""
        self._unsent.append(number)  # `_reach` may run processes, which a signal handler mustn't

    def note(self, job: Job[Any], report: Report) -> None:
        """Record a report, which ends the job unless the launcher may restart it."""
        if not self._restarts:
            super().note(job, report)
        # A late report of an attempt that `_restart` has printed already is dropped.
        elif report.attempt >= self._attempt:
            if any(each.attempt < report.attempt for each in self.reports):
                self._restart()  # although it was to wait for more reports
            self.reports.append(report)
            # The launcher doesn't restart after the last attempt, which `_outcome` reports.
            soon = min(self._restart_at, time.monotonic() + _OTHERS_S)
            self._restart_at = soon if report.attempt < self._script.max_restarts else math.inf

    def print(self, job: Job[Any], target: int, line: bytes) -> None:
        """Print a line; after a report or signal, `run` decides on a launcher's own lines."""
        # `_infos` holds the ranks that this process has started itself: without a launcher, every
        # line is a rank's. A launcher's remarks on a failure or signal would hide our own
        # text about it, so they are held back, and `run` prints them if there is no such text.
        is_ending = target == 2 and (self.reports or job.orders.received)
        if is_ending and not self._infos and not _OF_A_RANK.search(line):
            self._of_launcher.append(line)
        else:
            show(target, line)

    def poll(self, job: Job[Any], until: float) -> None:
        """Print the processes' output, and record which of them have ended."""
        self._forward_signals()
        # With `_restarts`, `processes` holds a launcher alone, instead of one process for each rank
        # of this host; the wrappers of ranks are found below it.
        may_restart = self._restarts and job.orders.received
        # A launcher may see a failure in the end of ranks that have saved, and start all again:
        # then there are wrappers that `_reach_below` hasn't signalled.
        if may_restart and not _below(self.processes[0].pid) <= self._signalled:
            job.stop(LaunchError("ranks that a signal had ended were started again"))
        # Before the exit codes, as a rank's report explains its failure better than its code does.
        self.pass_on(job, self._pipes.read(min(_POLL_S, until - time.monotonic())))
        # `note` sets this time at a report; after a signal to end, no restart follows.
        if time.monotonic() > self._restart_at and not job.orders.received:
            self._restart()
        codes = [process.poll() for process in self.processes]
        # Each call records all codes again, which changes neither a result nor a first failure.
        for rank, code in zip(self._ranks, codes, strict=True):
            if code == 0:
                job.succeed(rank, b"")  # a script has no result
            elif code is not None:
                job.fail(rank, None)
        # No report can follow but those still in the pipes, which `end` reads. If all codes are 0,
        # every rank has its result, so that the job is over anyway.
        if None not in codes and any(codes):
            job.stop(LaunchError("all processes of the job have ended"))

    def end(self, job: Job[Any]) -> None:
        """Stop the remaining processes gracefully, within seconds, and drain their output."""
        is_signalled = bool(job.orders.received)
        # A launcher ends its job by itself after a failure; without one, `began_at` is long past.
        if not self._infos and not is_signalled:
            self._read_until(job, job.failures.began_at + _OWN_END_S)
        begin = time.monotonic()
        self._codes = [process.poll() for process in self.processes]  # without our signals
        self._forward_signals()
        first: int = signal.SIGTERM if self._infos else self._end_signal
        if is_signalled:
            first = 0  # sends nothing: the ranks have had a signal, and are ending
        # At a second signal, wrappers kill their programs; `run` kills the processes that remain.
        for number, wait_s in ((first, END_S), (self._end_signal, _KILL_S)):
            self._signal(number)
            self._read_until(job, time.monotonic() + wait_s)
        # Children of ended processes may hold the pipes open; any other process is killed next.
        if all(process.poll() is not None for process in self.processes):
            self._read_until(job, begin + _DRAIN_S)

    def _restart(self) -> None:
        """Print why an attempt failed after which the launcher restarts all ranks."""
        self._attempt = max(report.attempt for report in self.reports) + 1
        restart(verdict(self.reports), self._attempt, self._script.max_restarts)
        self._restart_at = math.inf
        self.reports.clear()
        self._of_launcher.clear()

    def _read_until(self, job: Job[Any], limit: float) -> None:
        """Print the processes' output until all have ended and closed it, or until `limit`."""
        while time.monotonic() < limit:
            has_ended = all(process.poll() is not None for process in self.processes)
            if has_ended and not self._pipes.open:
                return
            self.pass_on(job, self._pipes.read(_POLL_S / 4))  # may exceed the limit by this

    def _forward_signals(self) -> None:
        """Send this process's signals to the ranks, as their launcher wouldn't pass them on."""
        while self._unsent:
            number = self._unsent.pop(0)
            # These signals leave no time to save: the launcher, or each wrapper, ends the ranks.
            if number in (signal.SIGINT, signal.SIGKILL):
                self._signal(self._end_signal)
            # With infos, `processes` are the ranks' wrappers. Otherwise the only one is a launcher,
            # which is signalled itself only if its ranks can't be reached.
            elif self._infos or not self._reach(self.processes[0].pid, number):
                self._signal(number)

    def _reach_below(self, launcher: int, number: int) -> bool:
        """Signal the wrappers below a launcher; return whether there are any."""
        self._signalled = _below(launcher)
        for process in self._signalled:
            with contextlib.suppress(Exception):  # psutil's, if the process has ended
                process.send_signal(number)
        return bool(self._signalled)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, number)

    def _lost(self) -> list[Report]:
        """Return reports of ranks whose wrapper failed by itself, and without a report."""
        reported = {report.rank for report in self.reports}
        # A code of None is of a process that ran until `end` signalled it.
        return [
            Report.of(info, process.pid, code, words=_WITH_WRAPPER, is_lost=True)
            for process, info, code in zip(self.processes, self._infos, self._codes, strict=False)
            if code and info.rank not in reported
        ]

    def _outcome(self, job: Job[Any]) -> ScriptOutcome:
        """Return the outcome, by reports, signals and exit codes of the processes."""
        if job.orders.received:
            return outcome(job, self.reports)
        codes = [process.poll() for process in self.processes]
        if not job.failures and not any(codes):  # reports of repeated attempts don't count
            if self._restart_at < math.inf:  # the new attempt ended before `poll` printed it
                self._restart()
            return ScriptOutcome(0)
        # The first code that isn't 0 counts: one from before this process's signals, if any.
        return outcome(job, [*self.reports, *self._lost()], [*self._codes, *codes])


def _below(launcher: int) -> set[Any]:
    """Find the wrappers of ranks below a launcher of this host."""
    found: set[Any] = set()
    with contextlib.suppress(Exception):  # psutil's, if a process has ended
        waiting = [load("psutil:Process")(launcher)]
        while waiting:
            for child in waiting.pop().children():
                words = child.cmdline() or [""]
                # A title replaces the command line.
                if RANK_WRAPPER in words or words[0].startswith(TITLE):
                    found.add(child)
                else:
                    waiting.append(child)
    return found


def outcome(
    job: Job[Any], reports: Sequence[Report], codes: Iterable[int | None] = ()
) -> ScriptOutcome:
    """Return the outcome of a job that a signal or a failure has ended."""
    if job.orders.received:
        number = job.orders.received[0]
        have_saved = number in TO_SAVE and not job.late and not job.failures
        code = 0 if have_saved else exit_code_of(-number)
        # A secondary failure may follow from the end of a rank that the signal has ended.
        known = [each for each in reports if not each.is_secondary]
        return replace(verdict(known), code=code, interrupted=number)
    found = verdict(reports)
    if found.failed is not None:
        return found
    return replace(found, code=exit_code_of(next(filter(None, codes), found.code)))


def verdict(reports: Sequence[Report]) -> ScriptOutcome:
    """Return the outcome of the last attempt, with the failure that caused the others."""
    # A rank that has the terminal is chosen only if all other failures are secondary.
    last = max((report.attempt for report in reports), default=0)
    failed = [report for report in reports if report.attempt == last]
    if not failed:
        return ScriptOutcome(0)
    first, *rest = sorted(failed, key=lambda each: each.cause_order)
    highest = first.cause_order
    others = tuple(each for each in rest if not each.is_secondary and each.cause_order <= highest)
    return ScriptOutcome(first.exit_code or 1, first, others=others)


def failure(found: ScriptOutcome) -> list[str]:
    """Return a line for the first failure of a job, and a line for each independent one."""
    if found.failed is None:
        return []
    also = [f"also: {each.headline}" for each in found.others[:_MOST_ALSO]]
    left = len(found.others) - len(also)
    if left:
        also.append(f"also: {left} more")
    return [f"error: {found.failed.text()}", *also]


def restart(found: ScriptOutcome, number: int, most: int) -> None:
    """Print why all ranks restart."""
    for line in (*failure(found), f"restart {number} of {most}"):
        show(2, f"{line}\n".encode())


class ScriptEndedError(SystemExit):
    """Raised in a rank whose script has failed; the exit code is the script's."""

    def __init__(self, code: int, report: Report | None = None) -> None:
        super().__init__(code)
        self.report = report


def _run_rank(script: Script, environ: Mapping[str, str], info: RankInfo) -> None:
    """Run the script as this rank; raise its failure."""
    supervisor = Supervisor(script, [info])
    variables = {**without(os.environ, OF_TORCH), **environ, **env_for(info)}
    supervisor.start(script.rank_argv(os.getpid()), variables)
    found = supervisor.run()
    if found.code != 0:
        # By this cause, `describe` marks the failure as a consequence of another rank's.
        is_secondary = found.failed is not None and found.failed.is_secondary
        cause = PeerFailedError("another rank failed") if is_secondary else None
        raise ScriptEndedError(found.code, found.failed) from cause


def run_as_function(script: Script, launch: Callable[..., Any]) -> ScriptOutcome:
    """Run a script in replicas of a launcher that runs only functions."""
    for name in ("hosts", "max_restarts", "timeout_s", "options"):
        if getattr(script, name):
            raise ArgumentError(f"this launcher does not support --{name.replace('_', '-')}")
    # Once, as a second exception would interrupt the launcher while it ends its ranks.
    with signals(is_once=True) as seen:
        try:
            launch(partial(_run_rank, script, run_variables(os.environ)), script.plan())
        except BaseException as error:  # a launcher may convert the exception that a signal raises
            if not seen:
                return _outcome_of(error, script.world_size)
    if seen:  # `launch` may have returned without an exception, or before its ranks ended
        return ScriptOutcome(exit_code_of(-seen[0]), interrupted=seen[0], is_ended=False)
    return ScriptOutcome(0)


def _outcome_of(error: BaseException, world_size: int) -> ScriptOutcome:
    """Return the outcome of a failed script from its report; raise other errors."""
    for cause in chain(error, with_contexts=True):  # the launcher's error may wrap it
        if isinstance(cause, ScriptEndedError) and cause.report is not None:
            return verdict([cause.report])
    if not isinstance(error, WorkerFailedError) or not error.exit_code:
        raise error
    # The error names neither the host nor the process.
    report = Report(error.rank, world_size, "unknown", -1, error.exit_code)
    return verdict([replace(report, words=error.traceback or str(error))])
