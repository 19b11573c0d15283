"""One run of mpiexec: what its ranks tell the process that started it, and how all of them end.

Each rank connects to a Unix socket in a private directory, says who it is by MPI's variables, and
then is a worker like those of the other launchers. When the parent ends, however it does, the
connections close, and the ranks end with them.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import cloudpickle

from unisono.control.addresses import peer
from unisono.deadlines import DEFAULT_TIMEOUT_S, require_time
from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.job import raised
from unisono.launchers.job.process_state import directory, search_path
from unisono.launchers.job.stopped import Stops
from unisono.launchers.job.worker import Failure, Task, work
from unisono.topology import RankInfo

__all__ = ("Job", "join")

_HELLO = b"h"  # body: pickle of (RankInfo or None, the rank's variables)
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
)
_SIGNAL = re.compile(r"signal:? (\d+)", re.IGNORECASE)
# What Open MPI says, whose own code is 1 then; it breaks lines as they come.
_AFTER_A_ZERO = re.compile(r"exiting\s+improperly")
_TAIL_BYTES = 8192
_TAIL_LINES = 12
_POLL_S = 0.1
_PRIMARY_WAIT_S = 1.0  # how long an error that only reports a peer's waits for the peer's own
_END_S = 2.0  # after END, of which ranks die and mpiexec with them, before SIGTERM
_TERM_S = 3.0  # after SIGTERM, before SIGKILL
_EXIT_S = 10.0  # for MPI's own end, after all results have come
_HELLO_S = 5.0


def join(link: str) -> NoReturn:
    """Be one rank of a job: connect to the parent, and work.

    Local.

    Args:
        link: path of the parent's socket.
    """
    channel = socket.socket(socket.AF_UNIX)
    try:
        channel.connect(link)
    except OSError:  # the parent is gone
        os._exit(1)
    body = pickle.dumps((_who_am_i(os.environ), dict(os.environ)))
    messages.send(channel, _HELLO, body)
    work(channel.detach(), os.getppid())


def _who_am_i(environ: Mapping[str, str]) -> RankInfo | None:
    for rank_name, size_name in _VARIABLES:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal():
            where = int(rank), int(size)
            return RankInfo(*where, *where, 0, 1, source="spawn")
    return None


@dataclass(slots=True)
class _Rank:
    """One rank as the parent sees it."""

    rank: int
    channel: socket.socket
    task: memoryview
    inbox: messages.Inbox = field(init=False)
    result: bytes | None = None
    failure: Failure | None = None
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.inbox = messages.Inbox(self.channel)

    @property
    def is_secondary(self) -> bool:
        """Whether its failure only reports that of another rank."""
        return self.failure is not None and self.failure.is_secondary


class Job:
    """A running mpiexec and its ranks.

    Args:
        process: mpiexec, its stderr a pipe.
        n_ranks: how many ranks it makes.
        entry: cloudpickle of a callable of one RankInfo.
        stop_limit_s: seconds for which a rank may be stopped by a signal.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        n_ranks: int,
        entry: bytes,
        stop_limit_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._stops = Stops(stop_limit_s, n_ranks)
        self._process = process
        self._n_ranks = n_ranks
        self._entry = entry
        self._ranks: list[_Rank] = []
        self._failed: list[_Rank] = []
        self._said = b""
        self._tail = threading.Thread(target=self._pass_on, name="unisono-mpiexec", daemon=True)
        self._tail.start()

    def results(self, listener: socket.socket, timeout_s: float | None) -> list[Any]:
        """Wait for all ranks.

        Local.

        Args:
            listener: where they connect.
            timeout_s: seconds for the whole job; None for no limit but that of the block.

        Returns:
            What the entry returned, by rank.

        Raises:
            WorkerFailedError: a rank failed.
            LaunchError: mpiexec failed, or the time is over.
            CollectiveTimeoutError: the block's deadline is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while sum(rank.result is not None for rank in self._ranks) < self._n_ranks:
            if self._failed:
                self._wait_for_a_primary(listener)
                raise self._error()
            if self._process.poll() is not None and not self._poll(listener, 0):
                raise LaunchError(
                    f"mpiexec ended with exit code {self._process.returncode} before the ranks "
                    f"were at work; its last words:\n{self._last_words()}"
                )
            if deadline is not None and time.monotonic() > deadline:
                raise LaunchError(f"ranks {self._late()} weren't done after {timeout_s} s")
            require_time(self._late(), self._n_ranks)
            stopped = self._stops.look(self._pids())
            if stopped is not None:
                raise stopped
            self._poll(listener, _POLL_S)
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has ended
                messages.send(rank.channel, messages.DONE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._ranks.sort(key=lambda rank: rank.rank)
        return [cloudpickle.loads(rank.result) for rank in self._ranks]

    def _late(self) -> list[int]:
        done = {rank.rank for rank in self._ranks if rank.result is not None}
        return [rank for rank in range(self._n_ranks) if rank not in done]

    def _pids(self) -> dict[int, int]:
        """Give the processes of ranks that are at work."""
        at_work = [rank for rank in self._ranks if rank.result is None and not rank.is_gone]
        pids = {rank.rank: peer(rank.channel).pid for rank in at_work}
        return {rank: pid for rank, pid in pids.items() if pid is not None}

    def end(self) -> None:
        """End mpiexec and all ranks that still run, within seconds.

        Local.
        """
        patience_s = 0.0
        for rank in self._ranks:
            if not rank.is_gone and self._process.poll() is None:
                with contextlib.suppress(OSError):
                    rank.channel.setblocking(False)
                    messages.send(rank.channel, messages.END)
                    patience_s = _END_S
        for wait_s, number in ((patience_s, signal.SIGTERM), (_TERM_S, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        for rank in self._ranks:
            rank.channel.close()  # which ends a rank that mpiexec has left behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_S)
        self._tail.join(1.0)

    def _poll(self, listener: socket.socket, timeout_s: float) -> bool:
        """Take in what has come, and tell whether anything had. Local."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            for rank in self._ranks:
                if not rank.is_gone:
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.task else 0)
                    selector.register(rank.channel, events, rank)
            ready = [key.data for key, _ in selector.select(timeout_s)]
        for rank in ready:
            if rank is None:
                self._welcome(listener)
            else:
                self._talk(rank)
        return bool(ready)

    def _talk(self, rank: _Rank) -> None:
        with contextlib.suppress(OSError):  # it has died already: _hear says so
            if rank.task:
                sent = rank.channel.send(rank.task, socket.MSG_DONTWAIT)
                rank.task = rank.task[sent:]
        self._hear(rank)

    def _welcome(self, listener: socket.socket) -> None:
        channel, _ = listener.accept()
        channel.settimeout(_HELLO_S)
        message = messages.receive(channel)
        channel.settimeout(None)
        if message is None:
            channel.close()
            return
        info, environ = pickle.loads(message[1])
        if info is None or info.world_size != self._n_ranks:
            raise LaunchError(
                f"{self._n_ranks} ranks were asked for, but the launcher made a process that MPI's "
                f"variables say is {info}: is it an mpiexec?"
            )
        path = search_path()
        task = Task(self._entry, info, environ, path, list(sys.argv), directory())
        body = pickle.dumps(task)
        words = memoryview(messages.head(messages.TASK, len(body)) + body)
        self._ranks.append(_Rank(info.rank, channel, words))
        if len(self._ranks) == self._n_ranks:  # from now on a kill of this process leaves no file
            shutil.rmtree(os.path.dirname(listener.getsockname()), ignore_errors=True)

    def _hear(self, rank: _Rank) -> None:
        try:
            message = rank.inbox.take()
        except EOFError:
            rank.is_gone = True
            if rank.result is None and rank not in self._failed:
                self._failed.append(rank)
            return
        if message is None:
            return
        if message[0] == messages.RESULT:
            rank.result = message[1]
        else:
            rank.failure = pickle.loads(message[1])
            self._failed.append(rank)

    def _wait_for_a_primary(self, listener: socket.socket) -> None:
        """Wait a little for a failure of its own kind where there are only reports of others'."""
        limit = time.monotonic() + _PRIMARY_WAIT_S
        while all(rank.is_secondary for rank in self._failed) and time.monotonic() < limit:
            self._poll(listener, _POLL_S)

    def _pass_on(self) -> None:
        """Pass on what mpiexec and the ranks print to stderr, and keep the end of it."""
        stream = self._process.stderr
        assert isinstance(stream, io.BufferedReader)
        with stream:
            while chunk := stream.read1(65536):
                self._said = (self._said + chunk)[-_TAIL_BYTES:]
                with contextlib.suppress(Exception):  # sys.stderr may be closed, or a user's own
                    sys.stderr.write(chunk.decode(errors="replace"))
                    sys.stderr.flush()

    def _last_words(self) -> str:
        self._tail.join(1.0)
        lines = self._said.decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or "(none)"

    def _error(self) -> WorkerFailedError:
        first = next((rank for rank in self._failed if not rank.is_secondary), self._failed[0])
        who, failure = f"rank {first.rank} of {self._n_ranks}", first.failure
        if failure is None:
            return self._death(first.rank, who)
        return raised(first.rank, self._n_ranks, failure)

    def _death(self, rank: int, who: str) -> WorkerFailedError:
        """Say how a rank ended that left no word; only mpiexec, whose child it was, knows."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_S)
        words, code = self._last_words(), self._process.poll()
        said = self._said.decode(errors="replace")
        code = 0 if _AFTER_A_ZERO.search(said) else code
        found = _SIGNAL.search(said)
        name = None
        with contextlib.suppress(ValueError):
            name = signal.Signals(int(found[1])).name if found else None
        how = f"was ended by {name}" if name else f"ended with exit code {code}"
        return WorkerFailedError(
            f"{who} {how} before its work was done; mpiexec's last words:\n{words}",
            rank=rank,
            exit_code=None if name else code,
            signal=name,
        )
