"""A job of a script as the one who launched it sees it: its lines, its failures, its end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from unisono.deadlines import limit_of, overdue
from unisono.errors import CollectiveTimeoutError, LaunchError
from unisono.launchers.job.failure import exit_code_of
from unisono.launchers.job.job import Job, Ranks
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import Script, dying_with
from unisono.topology import RankInfo
from unisono.tracebacks import fold_text

__all__ = (
    "Outcome",
    "Programs",
    "SignalledError",
    "Supervisor",
    "held_back",
    "run_launcher",
    "show",
    "signals",
    "start",
    "verdict",
)

_POLL_S = 0.2
_OWN_END_S = 2.0  # how long a launcher has to end its job by itself after a failure
_END_S = 1.5  # from the first signal to SIGKILL; ranks give their programs 1 s
_DRAIN_S = 2.0
_ROUSE_S = 1.0
_LAUNCHER = -1  # stands for a launcher that makes the ranks itself


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Args:
        code: exit code: of the rank that failed first, else of the launcher.
        failed: the rank that failed first; None if none said so.
        interrupted: the signal that this process got, None if none.
        is_late: whether the block's deadline ended it.
        others: those that failed by themselves too.
        told: those that were ended with a traceback that nobody has seen.
        is_ended: whether all ranks are known to have been ended.
    """

    code: int
    failed: Report | None = None
    interrupted: int | None = None
    is_late: bool = False
    others: Sequence[Report] = ()
    told: Sequence[Report] = ()
    is_ended: bool = True


class SignalledError(BaseException):
    """Raised in the main thread by the signals that end a job."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def start(
    arguments: Sequence[str], environ: Mapping[str, str], terminal: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a launcher, or a rank.

    Local. It is in a session of its own: this process decides what Ctrl-C means.

    Args:
        arguments: its command line.
        environ: its variables.
        terminal: descriptors that it has besides; its stdin is this process's then, else empty.

    Raises:
        LaunchError: there is no such program.
    """
    try:
        return subprocess.Popen(
            list(arguments),
            env=dict(environ),
            stdin=None if terminal else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=terminal,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise LaunchError(f"can't start {arguments[0]!r}: {error}") from error


def run_launcher(
    script: Script, arguments: Sequence[str], environ: Mapping[str, str], end_signal: int = 0
) -> Outcome:
    """Run a launcher that makes the ranks of a script, and that ends with this process.

    Local.

    Args:
        script: what was asked for.
        arguments: the launcher's command line.
        environ: its variables.
        end_signal: what ends it in peace; 0 for the signal that this process gets.

    Returns:
        How it went.

    Raises:
        LaunchError: no process can be started.
    """
    front = Supervisor(script.token, script.may_restart, end_signal)
    front.processes.append(start(dying_with(os.getpid(), signal.SIGTERM, list(arguments)), environ))
    return front.run()


class Programs(Ranks):
    """Programs that tell of their failures by reports among the lines that they print.

    Args:
        token: marks the reports of the job's ranks.
    """

    def __init__(self, token: str) -> None:
        self.reports: list[Report] = []
        self._reader = Reader(token)
        self._rests: dict[Hashable, bytes] = {}

    def doubt(self, rank: int) -> int:
        """Doubt that a rank failed by itself which hasn't reported that. Local."""
        del rank
        return 1

    def note(self, job: Job[Any], report: Report) -> None:
        """Take a report in. Local."""
        self.reports.append(report)
        job.fail(report.rank, report)

    def pass_on(self, job: Job[Any], source: Hashable, target: int, chunk: bytes) -> None:
        """Print the whole lines of a chunk, and note the reports among them.

        Local.

        Args:
            job: its reports are of.
            source: the stream that it came from.
            target: where lines are printed: 1 or 2.
            chunk: empty at the stream's end.
        """
        lines = (self._rests.pop(source, b"") + chunk).splitlines(keepends=True)
        if chunk and lines and not lines[-1].endswith((b"\n", b"\r")):
            self._rests[source] = lines.pop()
        for line in lines:
            report = self._reader.read(line)
            if isinstance(report, Report):
                self.note(job, report)
            elif not report:
                show(target, line)


class Supervisor(Programs):
    """Processes of one job: a launcher, or all ranks of this host.

    Args:
        token: marks the reports of the job's ranks.
        restarts: whether the launcher itself starts the job again after a failure.
        end_signal: what ends them in peace; 0 for the signal that this process gets.
        infos: who they are, where each is a rank.
    """

    def __init__(
        self,
        token: str,
        restarts: bool = False,
        end_signal: int = 0,
        infos: Sequence[RankInfo] = (),
    ) -> None:
        super().__init__(token)
        self.processes: list[subprocess.Popen[bytes]] = []
        """What was started, outputs as pipes."""
        self._restarts = restarts
        self._end_signal = end_signal
        self._infos = infos
        self._ranks = [info.rank for info in infos] or [_LAUNCHER]
        self._selector = selectors.DefaultSelector()
        self._signals: Sequence[int] = ()
        self._codes: list[int | None] = []
        self._is_late = False
        self._roused_at = 0.0

    def run(self) -> Outcome:
        """Pass on what they print until all have ended; end all if one fails.

        Local.

        Returns:
            How it went; nothing is printed about a failure.
        """
        job: Job[None] = Job(self, len(self._ranks), self._ranks)
        with self._selector, signals() as self._signals:
            for process in self.processes:
                for stream, target in ((process.stdout, 1), (process.stderr, 2)):
                    assert stream is not None
                    self._selector.register(stream, selectors.EVENT_READ, target)
            with contextlib.suppress(LaunchError, CollectiveTimeoutError, SignalledError):
                job.finish()
        self.kill()
        return self._outcome(has_failed=bool(job.failures))

    def kill(self) -> None:
        """End all processes at once. Local."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DRAIN_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def note(self, job: Job[Any], report: Report) -> None:
        """Take a report in; it ends the job unless the launcher starts that again. Local."""
        if self._restarts:
            self.reports.append(report)
        else:
            super().note(job, report)

    def poll(self, job: Job[Any], until: float) -> None:
        """Pass on what they print, and take in who has ended. Local."""
        self._is_late = limit_of(None) == 0
        if self._is_late:
            raise CollectiveTimeoutError(overdue(job.late, job.world_size))
        if self._infos and time.monotonic() > self._roused_at + _ROUSE_S:
            self._roused_at = time.monotonic()
            self._signal(signal.SIGCONT)  # wrappers: nobody but us has a use for their stop
        self._read(job, min(_POLL_S, until - time.monotonic()))
        codes = [process.poll() for process in self.processes]
        for rank, code in zip(self._ranks, codes, strict=True):
            if code == 0:
                job.succeed(rank, b"")
            elif code is not None:
                job.fail(rank, None)
        if None not in codes and any(codes):
            job.stop(LaunchError("all processes of the job have ended"))

    def end(self, job: Job[Any]) -> None:
        """Let what still runs end in peace, within seconds; read what it still says. Local."""
        if len(self.processes) == 1 and not self._signals and not self._is_late:
            with contextlib.suppress(SignalledError):  # a launcher ends its job by itself
                self._read_until(job, job.failures.began_at + _OWN_END_S)
        begin = time.monotonic()
        self._codes = [process.poll() for process in self.processes]
        if None in self._codes:
            self._signal(self._end_signal or next(iter(self._signals), signal.SIGTERM))
            self._read_until(job, begin + _END_S)
        if all(process.poll() is not None for process in self.processes):
            self._read_until(job, begin + _DRAIN_S)

    def _read_until(self, job: Job[Any], limit: float) -> None:
        """Pass on what they print until all have ended and say no more."""
        while time.monotonic() < limit:
            has_ended = all(process.poll() is not None for process in self.processes)
            if has_ended and not self._selector.get_map():
                return
            self._read(job, _POLL_S / 4)

    def _read(self, job: Job[Any], timeout_s: float) -> None:
        if not self._selector.get_map():
            time.sleep(max(0.0, min(timeout_s, 0.02)))
            return
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            chunk = os.read(key.fd, 65536)
            if not chunk:
                self._selector.unregister(key.fileobj)
            self.pass_on(job, key.fd, key.data, chunk)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, number)

    def _lost(self) -> list[Report]:
        """Report the ranks whose wrapper had ended without a report before others were ended."""
        reported = {report.rank for report in self.reports}
        return [
            Report(
                info.rank,
                info.world_size,
                socket.gethostname(),
                process.pid,
                code,
                output="the process that looked after it ended so, and the rank with it",
                local_rank=info.local_rank,
                node_rank=info.node_rank,
                is_lost=True,
            )  # fmt: skip
            for process, info, code in zip(self.processes, self._infos, self._codes, strict=False)
            if code and info.rank not in reported
        ]

    def _outcome(self, has_failed: bool) -> Outcome:
        primary = [report for report in self.reports if not report.is_secondary]
        if self._signals:
            number = self._signals[0]
            told = (report for report in self.reports if report.was_told)
            return replace(
                verdict([*primary, *told]), code=exit_code_of(-number), interrupted=number
            )
        if self._is_late:
            return Outcome(1, is_late=True)
        codes = [process.returncode for process in self.processes]
        if not has_failed and not any(codes):
            return Outcome(0)
        outcome = verdict([*self.reports, *self._lost()])
        if outcome.failed is not None:
            return outcome
        code = next((code for code in [*self._codes, *codes] if code), outcome.code)
        return replace(outcome, code=exit_code_of(code))


def verdict(reports: Sequence[Report]) -> Outcome:
    """Choose among the reports of the last attempt the one that caused the others.

    Local, and pure. A rank that has the terminal is chosen where all others are secondary.
    """
    last = max((report.attempt for report in reports), default=0)
    latest = [report for report in reports if report.attempt == last]
    told = tuple(report for report in latest if report.was_told)
    failed = sorted((each for each in latest if not each.was_told), key=lambda each: each.doubt)
    if not failed:
        return Outcome(1 if told else 0, told=told)
    first, *rest = failed
    others = tuple(each for each in rest if not each.is_secondary and each.doubt <= first.doubt)
    return Outcome(first.exit_code or 1, first, others=others, told=told)


def held_back(outcome: Outcome) -> list[str]:
    """Give the lines of ranks that were ended, but of those that say the same only the first's.

    Local, and pure.
    """
    failed = [outcome.failed] if outcome.failed is not None else []
    known = {each.cause[1] for each in (*failed, *outcome.others)}
    lines = []
    for each in outcome.told:
        if each.cause[1] not in known:
            known.add(each.cause[1])
            lines += [f"[{each.rank}] {line}" for line in fold_text(each.output).splitlines()]
    return lines


@contextlib.contextmanager
def signals(is_once: bool = False) -> Iterator[list[int]]:
    """Turn the signals that end a program into an exception, while it lasts.

    Local. One that this process ignores stays ignored, as ``nohup`` and a shell's ``&`` want it,
    and one that is handled in C is left alone.

    Args:
        is_once: whether only the first does, and those after it do nothing.

    Yields:
        The numbers of those that came: a library in between may swallow the exception.
    """
    seen: list[int] = []

    def stop(number: int, _: Any) -> None:
        seen.append(number)
        if is_once and len(seen) > 1:
            return
        raise SignalledError(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield seen
        return
    before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number in numbers if before[number] not in (signal.SIG_IGN, None)]
    for number in taken:
        signal.signal(number, stop)
    try:
        yield seen
    finally:
        for number in taken:
            signal.signal(number, before[number])


def show(target: int, line: bytes) -> None:
    """Print a line of a rank to stdout (1) or stderr (2) as it is. Local."""
    stream = sys.stdout if target == 1 else sys.stderr
    buffer: IO[bytes] | None = getattr(stream, "buffer", None)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody may be left to read it
        if buffer is None:
            stream.write(line.decode(errors="replace"))
        else:
            buffer.write(line)
        stream.flush()
