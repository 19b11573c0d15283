"""The program of one rank: its start, its output, its end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from unisono.errors import UnisonoError
from unisono.launchers.job.failure import signal_name
from unisono.launchers.job.forkserver import Forked, die_with, guard, wake_by_signals
from unisono.launchers.job.output import Pipes
from unisono.launchers.job.process_state import name_process
from unisono.launchers.job.signals import OTHERS, TO_END, TO_SAVE, Orders, handled
from unisono.launchers.job.wrapper import end_like
from unisono.launchers.script.forks import fork
from unisono.launchers.script.rank.report import Report, encode
from unisono.launchers.variables import node_variables, rank_variables, share_of_cores
from unisono.plugins import read_environment
from unisono.topology import GRACE_S, PREFIXED, RankInfo
from unisono.tracebacks import last_exception

_DRAIN_S = 0.5  # after the program's end, for the output of its children
_POLL_S = 0.5
_SIGNALLED = 128  # to which a shell adds a signal's number for an exit code
_LAST_LINES = 100
_HEAD = b"Traceback (most recent call last):"
_UNCAUGHT = 1  # exit code of a Python program with an uncaught exception
_MOST_AFTER = 10  # lines after the exception: a long message, or libraries' warnings
_COLOURS = (36, 33, 35, 32, 34, 31, 96, 93, 95, 92, 94, 91)


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of one rank."""

    log_dir: str | None = None
    token: str = ""
    is_coloured: bool = False
    terminal: Sequence[int] | None = None
    local_ranks: Sequence[int] = ()
    grace_s: float = GRACE_S

    def prefix(self, info: RankInfo | None) -> bytes:
        """Return the prefix of each line."""
        if self.terminal:
            return b""
        text = f"[{info.rank}] " if info else "[?] "
        if self.is_coloured and info:
            text = f"\x1b[{_COLOURS[info.rank % len(_COLOURS)]}m{text}\x1b[0m"
        return text.encode()


def variables(
    info: RankInfo | None, environ: Mapping[str, str], is_prefixed: bool = False
) -> dict[str, str]:
    """Return the program's variables, which include torch's under any launcher."""
    merged = {"PYTHONUNBUFFERED": "1", **environ}
    merged.pop(PREFIXED, None)  # of an enclosing job
    if info is None:
        return merged
    facts = {**rank_variables(info), **node_variables(info), **share_of_cores(info)}
    # Variables that the launcher or the user has set have priority.
    return {**facts, **merged, PREFIXED: str(info.rank) if is_prefixed else ""}


def run_rank(
    parent: int,
    program: Sequence[str],
    options: Mapping[str, Any],
    *,
    server: socket.socket | None = None,
) -> NoReturn:
    """Be the wrapper of the rank in this process's variables, and exit as its program does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's "&" ignores it
    die_with(parent, signal.SIGTERM)  # at which this wrapper ends its program: see `Orders`
    end_like(_run(program, RankOptions(**options), server))


def _run(program: Sequence[str], options: RankOptions, server: socket.socket | None) -> int:
    """Run the program as the rank in this process's variables."""
    try:
        info = read_environment(os.environ)
    except UnisonoError as error:
        return _refuse(f"{type(error).__name__}: {error}", options.token)
    if info is not None:
        name_process(info.rank, info.world_size, _script_of(program))
    running = _Running(info, options)
    # Set before the start, as no signal may end this process without its program.
    with handled((*TO_END, *OTHERS), lambda number, _: running.signals.append(number)):
        try:
            running.open_logs(options.log_dir)
            running.start(program, server)
        except OSError as error:
            return _refuse(f"can't run {program[0]!r}: {error}", options.token, info)
        return running.wait()


def _script_of(program: Sequence[str]) -> str:
    """Return the script that a command line runs with Python, or else its program."""
    arguments = [word for word in program[1:] if not word.startswith("-")]
    return arguments[0] if arguments and program[0] == sys.executable else program[0]


def _refuse(text: str, token: str, info: RankInfo | None = None) -> int:
    """Report why the program can't be run; return the exit code."""
    rank, world_size = (info.rank, info.world_size) if info else (-1, -1)
    _send(Report(rank, world_size, socket.gethostname(), os.getpid(), 2, words=text), token)
    return 2


def _send(report: Report, token: str) -> None:
    """Write a report line by line, since a pipe keeps each line whole among other ranks' lines."""
    text = f"{report.text()}\n"
    data = encode(report, token) if token else text.encode("utf-8", "backslashreplace")
    for line in data.splitlines(keepends=True):
        _write(2, line)


class _Running:
    """One run of the program."""

    def __init__(self, info: RankInfo | None, options: RankOptions) -> None:
        self._info, self._token, self._terminal = info, options.token, options.terminal
        self._prefix = options.prefix(info)
        # A rank without a local number is always shown.
        shown = options.local_ranks
        self._is_hidden = bool(shown and info and info.local_rank not in (None, *shown))
        self._last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._raised_at = math.inf  # when the last traceback began before a signal to end
        self._is_interrupted = False
        mark = rb"^\[rank%d\]: " % (info.rank if info else -1)  # torch's own prefix
        self._mark = re.compile(mark if self._prefix else rb"(?!)")  # matches nothing
        self._pipes = Pipes()
        self.signals: list[int] = []
        """Signals that haven't been processed yet."""
        self._orders = Orders(options.grace_s)
        self._parent = os.getppid()
        self._process: subprocess.Popen[bytes] | Forked
        self._sent: set[int] = set()

    def open_logs(self, log_dir: str | None) -> None:
        """Open this rank's two log files; a restart appends to them."""
        if log_dir is None:
            return
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        mode = "ab" if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else "wb"
        name = f"rank{self._info.rank}" if self._info else f"pid{os.getpid()}"
        for fd, kind in ((1, "out"), (2, "err")):
            file = Path(log_dir, f"{name}.{kind}").open(mode, buffering=0)  # noqa: SIM115 - to its end
            self._pipes.logs[fd] = file

    def start(self, program: Sequence[str], server: socket.socket | None) -> None:
        """Start the program in a new process group, as a fork if there is a server."""
        parent = os.getpid()

        def in_child() -> None:  # safe, as this process has one thread
            os.setpgid(0, 0)
            die_with(parent, signal.SIGKILL)

        self._wake, _ = wake_by_signals()  # before the start, as its end may follow at once
        environ = variables(self._info, os.environ, bool(self._prefix))
        with contextlib.ExitStack() as held:
            nothing = held.enter_context(open(os.devnull, "r+b"))
            stdin = 0 if self._terminal else nothing.fileno()
            out, err = self._terminal or held.enter_context(self._pipes.ends())
            if server is not None:
                with contextlib.suppress(OSError):  # otherwise, as a new process
                    self._process = fork(server, {"environ": environ}, (stdin, out, err))
                    return
            self._process = subprocess.Popen(
                program,
                stdin=stdin,
                stdout=out,
                stderr=err,
                env=environ,
                close_fds=False,  # MPI's launchers pass descriptors
                preexec_fn=in_child,
            )

    def wait(self) -> int:
        """Print the program's lines until it ends, and report a failure."""
        self._pipes.wake(self._wake, partial(os.read, self._wake, 4096))
        if isinstance(self._process, Forked):
            self._pipes.wake(self._process.status, self._process.read_status)
        ended_at: float | None = None
        # Children of the program may keep its pipes open.
        while self._pipes.open or self._process.poll() is None:
            if self._process.poll() is not None:
                ended_at = ended_at or time.monotonic()
            self._forward_signals()
            self._print(self._pipes.read(self._wait_s(ended_at is not None)))
            self._warn_if_stopped()
            # Children that hold the pipes open get little time, and none after a signal.
            if ended_at and (self.signals or time.monotonic() > ended_at + _DRAIN_S):
                break
        self._print(self._pipes.rests())
        return self._finish()

    def _warn_if_stopped(self) -> None:
        """Warn if a signal has stopped the program; `poll` detects its end."""
        number: int | None = None
        if isinstance(self._process, Forked):
            number, self._process.stopped_by = self._process.stopped_by, None
        elif self._process.returncode is None and hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                # Without WEXITED, so that Popen reaps the program.
                status = os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG)
                number = None if status is None else status.si_status
        if number is not None:
            name = signal_name(number)
            self._warn(f"was stopped by {name}, and continues after SIGCONT")

    def _warn(self, text: str) -> None:
        who = f"rank {self._info.rank} of {self._info.world_size}" if self._info else "it"
        _write(2, self._prefix + f"warning: {who} {text}\n".encode())

    def _wait_s(self, has_ended: bool) -> float:
        if has_ended:  # no event marks the end of `_DRAIN_S`
            return _DRAIN_S / 10
        if self._orders.until is None:
            return _POLL_S
        # Not 0, as this loop would spin until SIGKILL takes effect.
        return min(_POLL_S, max(0.01, self._orders.until - time.monotonic()))

    def _print(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Print lines with the rank's prefix, and keep those of stderr for a report."""
        for fd, text in lines:
            if text == b"\r":  # a progress bar begins with a carriage return
                continue
            line = text.rstrip(b"\r\n") + b"\n"
            if fd == 2:
                line = self._mark.sub(b"", line)
                if line.startswith(_HEAD):
                    self._record_traceback()
                if self._is_interrupted:
                    continue
                self._last.append(line)
            if not self._is_hidden:
                _write(fd, self._prefix + line)

    def _record_traceback(self) -> None:
        """Record when a traceback began; after Ctrl-C, hide it and all later lines."""
        if self._orders.began_at is None:
            self._raised_at = time.monotonic()
        # On Ctrl-C every rank raises KeyboardInterrupt, which is of no use to users.
        self._is_interrupted |= signal.SIGINT in self._sent

    def _forward_signals(self) -> None:
        """Send signals on to the program, and kill it and its children when its time is over."""
        if self._process.poll() is not None:  # by itself; `_finish` ends its children
            return
        while self.signals:
            number = self._orders.take(self.signals.pop(0), os.getppid() != self._parent)
            if number in TO_SAVE:
                guard(self._process.pid)  # a launcher may kill this process before the program ends
            self._signal(number)
            if number in TO_SAVE:
                self._signal(signal.SIGCONT)  # a stopped program receives it once it continues
        is_over = self._orders.until is not None and time.monotonic() > self._orders.until
        if is_over and signal.SIGKILL not in self._sent:
            is_orphan = os.getppid() != self._parent  # which has less time
            if self._orders.received[0] in TO_SAVE and self._orders.grace_s and not is_orphan:
                self._warn(
                    f"hasn't ended {self._orders.grace_s:g} s after "
                    f"{signal_name(self._orders.received[0])} and is killed: --grace gives it more"
                )
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """Send a signal to the program; on Ctrl-C and at the end to its children, too."""
        self._sent.add(number)
        send = os.killpg if number in (signal.SIGINT, signal.SIGKILL) else os.kill
        with contextlib.suppress(OSError):
            send(self._process.pid, number)

    def _finish(self) -> int:
        """End the program's children, and report its failure; return its exit code."""
        code = self._process.poll()
        assert code is not None
        was_sent = -code in self._sent or code - _SIGNALLED in self._sent
        self._signal(signal.SIGKILL)  # ends the children that it left behind
        stopped_at = self._orders.began_at
        # A program that ends because of the signal hasn't failed; one that failed before it has.
        had_raised = stopped_at is not None and self._raised_at < stopped_at and not was_sent
        if code != 0 and (stopped_at is None or had_raised):
            _send(self._report(code), self._token)
        return code

    def _report(self, code: int) -> Report:
        text = b"".join(self._last).decode(errors="replace")
        # With any other exit code, lines after a traceback show that the program has caught it.
        raised, place = last_exception(text, _MOST_AFTER if code == _UNCAUGHT else 0)
        if code < 0 or self._terminal:  # it raised nothing, or the terminal showed it
            raised, place = "", ""
        lines = [] if self._terminal else text.splitlines(keepends=True)
        if not self._is_hidden:  # all lines were printed, so one at most is repeated
            lines = [] if raised else lines[-1:]
        is_lost = isinstance(self._process, Forked) and self._process.wait_status is None
        if is_lost:
            lines = ["its fork server has ended, and the rank with it"]
        return Report.of(
            self._info,
            self._process.pid,
            code,
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0),
            raised=raised,
            place=place,
            words="".join(lines),
            has_terminal=bool(self._terminal),
            is_lost=is_lost,
        )


def _write(fd: int, data: bytes) -> None:
    """Write all of it, unless the reader has gone."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(fd, view) :]
