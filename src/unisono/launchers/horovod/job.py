"""One run of horovodrun as the parent sees it: results, failures, the end of everybody."""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO, Any

import cloudpickle

from unisono.control.addresses import peer
from unisono.deadlines import DEFAULT_TIMEOUT_S, require_time
from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.job import raised
from unisono.launchers.job.process_state import directory, search_path
from unisono.launchers.job.stopped import Stops
from unisono.launchers.job.worker import Failure, Task
from unisono.topology import RankInfo

__all__ = ("Job",)

_START_S = 300.0  # until every rank has come, which includes importing torch there
_HELLO_S = 5.0
_PRIMARY_WAIT_S = 1.0  # how long a failure that another may have caused waits for that
_FLUSH_S = 0.3  # after END, before horovodrun is ended
_EXIT_S = 10.0  # for exit handlers, after all results have come
_KILL_S = 15.0  # horovodrun's helpers give ranks 5 s to end, twice
_POLL_S = 0.1
_SIGNALLED = 128  # what a shell adds to the number of the signal that ended a program
_ABORTED = _SIGNALLED + signal.SIGABRT
_SHELL_SAYS = frozenset({"Terminated", "Killed", "Aborted"})
_FROM_RANK = re.compile(rb"\[(\d+)\]<(stdout|stderr)>:")
_LINE = re.compile(rb"(?<=[\r\n])")
_EXITED = re.compile(rb"Process (\d+) exit with status code (\d+)\.")


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank: its channel, None if it never connected, and what came of it."""

    rank: int
    channel: socket.socket | None
    pid: int = 0
    task: memoryview = field(default_factory=lambda: memoryview(b""))
    result: bytes | None = None
    failure: Failure | None = None
    is_gone: bool = False
    inbox: messages.Inbox | None = field(init=False)

    def __post_init__(self) -> None:
        self.inbox = None if self.channel is None else messages.Inbox(self.channel)

    @property
    def is_secondary(self) -> bool:
        """Whether its failure only reports that of another rank."""
        return self.failure is not None and self.failure.is_secondary


@dataclass(slots=True)
class Job:
    """Ranks that run one function.

    Args:
        infos: who they are, by rank.
        entry: cloudpickle of the function.
        listener: where they connect.
        driver: the process that runs horovodrun.
        token: what they show before they are heard; empty where only this user's can connect.
        held: closed when all have come, or at the end; holds the listener.
        stop_limit_s: seconds for which a rank of this host may be stopped by a signal.
        is_verbose: whether what horovodrun itself says goes to stderr.
    """

    infos: list[RankInfo]
    entry: bytes
    listener: socket.socket
    driver: subprocess.Popen[bytes]
    token: str
    held: ExitStack
    stop_limit_s: float = DEFAULT_TIMEOUT_S
    is_verbose: bool = False
    _stops: Stops = field(init=False)
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _failed: list[_Rank] = field(default_factory=list)
    _failed_at: float = 0.0
    _exit_codes: dict[int, int] = field(default_factory=dict)
    _outputs: dict[IO[bytes], bytes] = field(default_factory=dict)
    _notes: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    _last_words: dict[int, deque[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stops = Stops(self.stop_limit_s, self.size)

    @property
    def size(self) -> int:
        """How many ranks the job has."""
        return len(self.infos)

    def results(self) -> list[Any]:
        """Wait for all ranks.

        Local.

        Returns:
            What the function returned, by rank.

        Raises:
            WorkerFailedError: a rank failed.
            LaunchError: horovodrun failed, or a rank didn't come.
            CollectiveTimeoutError: the block's deadline is over.
        """
        assert self.driver.stdout is not None
        assert self.driver.stderr is not None
        self._outputs = {self.driver.stdout: b"", self.driver.stderr: b""}
        begin = time.monotonic()
        while sum(rank.result is not None for rank in self._ranks.values()) < self.size:
            error = self._error(begin)
            if error is not None:
                raise error
            done = {rank for rank, each in self._ranks.items() if each.result is not None}
            require_time([rank for rank in range(self.size) if rank not in done], self.size)
            self._poll(_POLL_S)
        self._drain(_EXIT_S)
        results = [self._ranks[rank].result for rank in range(self.size)]
        return [cloudpickle.loads(result) for result in results if result is not None]

    def end(self) -> None:
        """End all ranks that still run, and horovodrun.

        Local.
        """
        if self._outputs:
            for rank in self._ranks.values():
                if rank.channel is not None and not rank.is_gone:
                    with contextlib.suppress(OSError):
                        rank.channel.setblocking(False)
                        messages.send(rank.channel, messages.END)
            self._drain(_FLUSH_S)
            for rank in self._ranks.values():
                is_here = rank.channel is not None and rank.channel.family == socket.AF_UNIX
                if is_here and not rank.is_gone:
                    with contextlib.suppress(OSError):
                        os.kill(rank.pid, signal.SIGKILL)
        self.driver.kill()
        self._drain(_KILL_S)  # until its helpers, which hold the other ends, have ended too
        for rank in self._ranks.values():
            if rank.channel is not None:
                rank.channel.close()
        self.held.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.driver.wait(_HELLO_S)
        for output in (self.driver.stdin, self.driver.stdout, self.driver.stderr):
            if output is not None:
                output.close()

    def _drain(self, limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while self._outputs and time.monotonic() < limit:
            self._poll(_POLL_S)

    def _poll(self, timeout_s: float) -> None:
        """Wait for news of anybody, and take it in."""
        with selectors.DefaultSelector() as selector:
            if self.listener.fileno() >= 0:
                selector.register(self.listener, selectors.EVENT_READ, self._welcome)
            for output in self._outputs:
                selector.register(output, selectors.EVENT_READ, lambda o=output: self._read(o))
            for rank in self._ranks.values():
                if rank.channel is not None and not rank.is_gone:
                    take_in = lambda r=rank: self._talk(r)  # noqa: E731 - bound to this rank
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.task else 0)
                    selector.register(rank.channel, events, take_in)
            for key, _ in selector.select(timeout_s):
                key.data()

    def _welcome(self) -> None:
        """Let a rank in that shows the token; its hello is the first pickle that is read."""
        channel, _ = self.listener.accept()
        channel.settimeout(_HELLO_S)
        with contextlib.suppress(OSError):
            if self._is_ours(channel):
                channel.settimeout(None)
                message = messages.receive(channel)
                if message is not None:
                    self._employ(channel, message[1])
                    return
        channel.close()

    def _is_ours(self, channel: socket.socket) -> bool:
        if channel.family == socket.AF_UNIX:
            return peer(channel).is_own_user
        shown = channel.recv(len(self.token), socket.MSG_WAITALL)
        return hmac.compare_digest(shown, self.token.encode())

    def _employ(self, channel: socket.socket, hello: bytes) -> None:
        number, pid, environ = pickle.loads(hello)
        info = self.infos[number]
        path = search_path()
        task = Task(self.entry, info, environ, path, list(sys.argv), directory())
        body = pickle.dumps(task)
        words = memoryview(messages.head(messages.TASK, len(body)) + body)
        self._ranks[number] = _Rank(number, channel, pid, words)
        if len(self._ranks) == self.size:
            self.held.close()

    def _talk(self, rank: _Rank) -> None:
        assert rank.channel is not None
        with contextlib.suppress(OSError):  # its end is seen when it is listened to
            if rank.task:
                sent = rank.channel.send(rank.task, socket.MSG_DONTWAIT)
                rank.task = rank.task[sent:]
        self._hear(rank)

    def _hear(self, rank: _Rank) -> None:
        assert rank.channel is not None
        assert rank.inbox is not None
        try:
            message = rank.inbox.take()
        except EOFError:
            rank.is_gone = True
            if rank.result is None and rank.failure is None:
                self._fail(rank)
            return
        if message is None:
            return
        if message[0] == messages.RESULT:
            rank.result = message[1]
        else:
            rank.failure = pickle.loads(message[1])
            self._fail(rank)

    def _fail(self, rank: _Rank) -> None:
        if not self._failed:
            self._failed_at = time.monotonic()
        self._failed.append(rank)

    def _read(self, output: IO[bytes]) -> None:
        data = os.read(output.fileno(), 1 << 16)
        *lines, rest = _LINE.split(self._outputs[output] + data)
        self._outputs[output] = rest
        if not data:
            lines = [rest] if rest else []
            del self._outputs[output]
        for line in lines:
            self._sort(line)

    def _sort(self, line: bytes) -> None:
        """Print what a rank printed; keep and read what horovodrun itself says."""
        match = _FROM_RANK.match(line)
        text = line[match.end() if match else 0 :].decode(errors="replace")
        if match is None:
            self._notes.append(text.rstrip())
            if self.is_verbose:
                with contextlib.suppress(Exception):  # as below
                    sys.stderr.write(text)
            exited = _EXITED.search(line)
            if exited is not None:
                rank = int(exited[1])
                self._exit_codes[rank] = int(exited[2])
                if rank not in self._ranks:
                    self._ranks[rank] = _Rank(rank, None, is_gone=True)
                    self._fail(self._ranks[rank])
            return
        is_error = match[2] == b"stderr"
        if is_error and self._failed and text.rstrip() in _SHELL_SAYS:
            return
        if is_error:
            self._last_words.setdefault(int(match[1]), deque(maxlen=20)).append(text.rstrip())
        stream = sys.stderr if is_error else sys.stdout
        with contextlib.suppress(Exception):  # it may be closed, or a user's own
            stream.write(text)
            stream.flush()

    def _error(self, begin: float) -> LaunchError | None:
        if self._failed:
            return self._first_failure()
        stopped = self._stops.look(
            {
                rank.rank: rank.pid
                for rank in self._ranks.values()
                if rank.channel is not None and rank.channel.family == socket.AF_UNIX
                if rank.result is None and not rank.is_gone
            }
        )
        if stopped is not None:
            return stopped
        if not self._outputs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(_HELLO_S)
            code = self.driver.returncode
            said = "\n".join(self._notes)
            return LaunchError(f"horovodrun ended with exit code {code} too early:\n{said}")
        missing = [rank for rank in range(self.size) if rank not in self._ranks]
        if missing and time.monotonic() - begin > _START_S:
            return LaunchError(f"ranks {missing} didn't come in {_START_S:g} s")
        return None

    def _first_failure(self) -> WorkerFailedError | None:
        """Tell the failure that caused the others, or None while it isn't known."""
        own = [rank for rank in self._failed if not rank.is_secondary]
        # Horovod aborts a process whose peer is lost while it has groups.
        first = min(own or self._failed, key=lambda r: self._exit_codes.get(r.rank) == _ABORTED)
        is_known = (
            first.failure is not None or self._exit_codes.get(first.rank, _ABORTED) != _ABORTED
        )
        if own and is_known or time.monotonic() - self._failed_at > _PRIMARY_WAIT_S:
            return self._failure_of(first)
        return None

    def _failure_of(self, rank: _Rank) -> WorkerFailedError:
        who = f"rank {rank.rank} of {self.size}"
        failure = rank.failure
        if failure is not None:
            return raised(rank.rank, self.size, failure)
        said = "\n".join(self._last_words.get(rank.rank, ()))
        said = f"; its last words:\n{said}" if said else ""
        code = self._exit_codes.get(rank.rank, 0)  # horovodrun says nothing of a 0
        if code > _SIGNALLED:
            name = signal.Signals(code - _SIGNALLED).name
            return WorkerFailedError(f"{who} was ended by {name}{said}", rank.rank, signal=name)
        return WorkerFailedError(
            f"{who} ended with exit code {code} before its work was done{said}", rank.rank, code
        )
