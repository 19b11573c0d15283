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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any

from unisono.deadlines import limit_of
from unisono.errors import LaunchError
from unisono.launchers.job.failure import PRIMARY_WAIT_S
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import Script, dying_with
from unisono.topology import RankInfo
from unisono.tracebacks import fold_text

__all__ = (
    "Supervisor",
    "Outcome",
    "SignalledError",
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
_BASE = 128


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
    words: Sequence[str], environ: Mapping[str, str], terminal: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a launcher, or a rank.

    Local. It is in a session of its own: this process decides what Ctrl-C means.

    Args:
        words: its command line.
        environ: its variables.
        terminal: descriptors that it has besides; its stdin is this process's then, else empty.

    Raises:
        LaunchError: there is no such program.
    """
    try:
        return subprocess.Popen(
            list(words),
            env=dict(environ),
            stdin=None if terminal else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=terminal,
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise LaunchError(f"can't start {words[0]!r}: {error}") from error


def run_launcher(
    script: Script, words: Sequence[str], environ: Mapping[str, str], end_signal: int = 0
) -> Outcome:
    """Run a launcher that makes the ranks of a script, and that ends with this process.

    Local.

    Args:
        script: what was asked for.
        words: the launcher's command line.
        environ: its variables.
        end_signal: what ends it in peace; 0 for the signal that this process gets.

    Returns:
        How it went.

    Raises:
        LaunchError: there is no such program.
    """
    front = Supervisor(script.token, script.max_restarts > 0, end_signal)
    front.processes.append(start(dying_with(os.getpid(), signal.SIGTERM, list(words)), environ))
    return front.run()


@dataclass(slots=True)
class Supervisor:
    """Processes of one job: a launcher, or all ranks of this host.

    Args:
        token: marks the reports of the job's ranks.
        restarts: whether the launcher itself starts the job again after a failure.
        end_signal: what ends them in peace; 0 for the signal that this process gets.
        processes: what was started, outputs as pipes.
        infos: who they are, where each is a rank.
    """

    token: str
    restarts: bool = False
    end_signal: int = 0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    infos: Sequence[RankInfo] = ()
    _codes: list[int | None] = field(default_factory=list)
    _is_late: bool = False
    _roused_at: float = 0.0
    _reports: list[Report] = field(default_factory=list)
    _failed_at: float | None = None
    _rests: dict[int, bytes] = field(default_factory=dict)

    def run(self) -> Outcome:
        """Pass on what they print until all have ended; end all if one fails.

        Local.

        Returns:
            How it went; nothing is printed about a failure.
        """
        reader = Reader(self.token)
        with selectors.DefaultSelector() as selector, signals():
            for process in self.processes:
                for stream, target in ((process.stdout, 1), (process.stderr, 2)):
                    assert stream is not None
                    selector.register(stream, selectors.EVENT_READ, target)
            interrupted = None
            try:
                while not self._is_over(selector) and not self._is_late:
                    self._poll(selector, reader, _POLL_S)
                    if self._should_end():
                        break
                    self._look_after()
            except SignalledError as error:
                interrupted = error.number
            self._codes = [process.poll() for process in self.processes]
            try:
                self._end(selector, reader, self.end_signal or interrupted or signal.SIGTERM)
            except SignalledError as error:  # a second Ctrl-C: at once
                interrupted = interrupted or error.number
        self.end()
        return self._outcome(interrupted)

    def end(self) -> None:
        """End all processes at once. Local."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DRAIN_S)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _is_over(self, selector: selectors.BaseSelector) -> bool:
        return not selector.get_map() and all(p.poll() is not None for p in self.processes)

    def _look_after(self) -> None:
        """See to what no stream tells: the block's deadline, and wrappers that are stopped."""
        self._is_late = limit_of(None) == 0
        if self.infos and time.monotonic() > self._roused_at + _ROUSE_S:
            self._roused_at = time.monotonic()
            self._signal(signal.SIGCONT)  # nobody but us has a use for their stop

    def _lost(self) -> list[Report]:
        """Report the ranks whose wrapper had ended without a report before others were ended."""
        reported = {report.rank for report in self._reports}
        found = []
        for process, info, code in zip(self.processes, self.infos, self._codes, strict=False):
            if code and info.rank not in reported:
                words = "the process that looked after it ended so, and the rank with it"
                who = (info.rank, info.world_size, socket.gethostname(), process.pid, code, 0)
                found.append(Report(*who, words, info.local_rank, info.node_rank))
        return found

    def _should_end(self) -> bool:
        """Tell whether the rest must be ended because of a failure."""
        codes = [process.poll() for process in self.processes]
        if None not in codes:
            return True
        if self._reports or any(codes):
            self._failed_at = self._failed_at or time.monotonic()
        if self._failed_at is None or self.restarts:
            return False
        is_primary = any(not report.is_secondary for report in self._reports)
        wait_s = 0.0 if is_primary else PRIMARY_WAIT_S
        if len(self.processes) == 1 and self.processes[0].poll() is None:
            wait_s = _OWN_END_S
        return time.monotonic() > self._failed_at + wait_s

    def _poll(self, selector: selectors.BaseSelector, reader: Reader, timeout_s: float) -> None:
        if not selector.get_map():
            time.sleep(min(timeout_s, 0.02))
            return
        for key, _ in selector.select(timeout_s):
            chunk = os.read(key.fd, 65536)
            if not chunk:
                selector.unregister(key.fileobj)
            lines = (self._rests.pop(key.fd, b"") + chunk).splitlines(keepends=True)
            if chunk and lines and not lines[-1].endswith((b"\n", b"\r")):
                self._rests[key.fd] = lines.pop()
            for line in lines:
                self._take(reader, line, key.data)

    def _take(self, reader: Reader, line: bytes, target: int) -> None:
        said = reader.read(line)
        if isinstance(said, Report):
            self._reports.append(said)
        elif not said:
            show(target, line)

    def _end(self, selector: selectors.BaseSelector, reader: Reader, number: int) -> None:
        """Let what still runs end in peace, within seconds; read what it still says."""
        begin, is_told = time.monotonic(), False
        while not self._is_over(selector):
            now, is_running = time.monotonic(), any(p.poll() is None for p in self.processes)
            if is_running and not is_told:
                self._signal(number)
                is_told = True
            if now > begin + (_END_S if is_running else _DRAIN_S):
                return
            self._poll(selector, reader, _POLL_S / 4)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, number)

    def _outcome(self, interrupted: int | None) -> Outcome:
        own = [report for report in self._reports if not report.is_secondary]
        if interrupted is not None:
            found = verdict([*own, *(report for report in self._reports if report.was_told)])
            return replace(found, code=_BASE + interrupted, interrupted=interrupted)
        if self._is_late:
            return Outcome(1, is_late=True)
        codes = [process.returncode for process in self.processes]
        if not any(codes):
            return Outcome(0)
        found = verdict([*(() if own else self._lost()), *self._reports])
        if found.failed is not None:
            return found
        code = next(code for code in [*self._codes, *codes] if code)
        return replace(found, code=code if code > 0 else _BASE - code)


def verdict(reports: Sequence[Report]) -> Outcome:
    """Choose among the reports the first of the last attempt that isn't secondary.

    Local, and pure. A rank that has the terminal is chosen where all others are secondary.
    """
    last = max((report.attempt for report in reports), default=0)
    latest = [report for report in reports if report.attempt == last]
    told = tuple(report for report in latest if report.was_told)
    failed = [report for report in latest if not report.was_told]
    if not failed:
        return Outcome(0, told=told)
    first = min(failed, key=lambda each: (each.is_secondary, not each.has_terminal))
    others = [each for each in failed if each is not first and not each.is_secondary]
    return Outcome(first.exit_code or 1, first, others=tuple(others), told=told)


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
            lines += [f"[{each.rank}] {line}" for line in fold_text(each.words).splitlines()]
    return lines


@contextlib.contextmanager
def signals(is_once: bool = False) -> Iterator[list[int]]:
    """Turn the signals that end a program into an exception, while it lasts.

    Local.

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
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
