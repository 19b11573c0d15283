"""Ranks that another library's launcher starts, on any host, and that connect to this process."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from selectors import EVENT_READ, BaseSelector
from typing import Any, TypeAlias

from unisono.control.addresses import keep_alive, listen, listen_locally
from unisono.control.handshake import Pending, answer
from unisono.deadlines import DEFAULT_TIMEOUT_S, limit_of
from unisono.errors import LaunchError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.failure import exit_code_of
from unisono.launchers.job.job import Job
from unisono.launchers.job.output import Pipes, show
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.worker import task_message
from unisono.launchers.job.worker_handles import Worker, Workers
from unisono.launchers.job.wrapper import Link, boot
from unisono.launchers.script.script import Script, dying_with
from unisono.topology import RankInfo

_POLL_S = 0.1  # between two checks of the launcher
_ARRIVE_S = 300.0  # from the first rank's connection to the last one's
_TERM_S = 3.0  # for the launcher to end, after its ranks and again after SIGTERM
_STRANGERS = 256  # most connections at a time from processes that aren't ranks
_Who: TypeAlias = RankInfo | str | None  # a text says why the process doesn't know its rank


@dataclass(frozen=True, slots=True)
class LauncherSpec:
    """How one launcher makes ranks, and how long it may take."""

    name: str  # its command, for errors
    world_size: int
    n_own: int | None = None  # ranks that connect here, if each node launches its own; None for all
    host: str = ""  # the launcher's variable with this host's address; empty if all ranks are here
    port: int = 0  # on this host, for ranks of other hosts; 0 for any free port
    names: Sequence[str] = ()  # the launcher's variables that identify a rank, as in `Link`
    start_s: float = 300.0  # until the first rank connects, which includes importing torch
    limit_s: float | None = None  # for the whole job
    exit_s: float = 10.0  # for the launcher to exit by itself after all results
    stop_limit_s: float = DEFAULT_TIMEOUT_S  # how long a rank may be stopped by a signal
    end_signal: int = signal.SIGTERM  # ends the launcher and its ranks

    @property
    def n_ranks(self) -> int:
        """Ranks that connect here."""
        return self.world_size if self.n_own is None else self.n_own


class _RankListener:
    """The socket to which each rank connects twice: for its channel, and for its status."""

    def __init__(self, spec: LauncherSpec, held: ExitStack) -> None:
        try:
            if spec.host:
                self.sock = held.enter_context(listen("", spec.port))
                port, token = self.sock.getsockname()[1], secrets.token_hex(16)
                self.link: Link = Link(port, token, spec.host, spec.names)
            else:  # without a token: the kernel reports which user's process connects
                self.sock, where = listen_locally(held)
                self.link = Link(where, names=spec.names)
        except OSError as error:
            raise LaunchError(f"ranks can't connect to this process: {error}") from error
        self.sock.setblocking(False)
        self._pending = Pending(self._admit, _STRANGERS + spec.n_ranks)
        self._halves: dict[tuple[int, int, str], dict[bytes, socket.socket]] = {}
        held.callback(self.close)

    def register(self, selector: BaseSelector) -> None:
        """Register the sockets that become readable as ranks connect."""
        if self.sock.fileno() >= 0:  # -1 once it is closed, after all ranks have connected
            selector.register(self.sock, EVENT_READ, self._accept)
        wake = self._pending.wake
        if wake.fileno() >= 0:
            selector.register(wake, EVENT_READ, partial(wake.recv, 4096))

    def _accept(self) -> None:
        try:
            while self._pending.accept(self.sock):
                pass
        except OSError as error:
            raise LaunchError(f"ranks can't connect to this process: {error}") from error

    def _admit(self, sock: socket.socket) -> tuple[bytes, Any] | None:
        """Return a connection's kind and hello; unpickle nothing before the rank's proof."""
        keep_alive(sock)
        kind = answer(sock, self.link.token.encode(), 1)  # one byte, from `Link.connect`
        message = None if kind is None else messages.receive(sock)
        return None if kind is None or message is None else (kind, pickle.loads(message[1]))

    def arrivals(self) -> Iterator[tuple[_Who, dict[str, str], socket.socket, socket.socket]]:
        """Yield each rank with both connections: its info, variables, channel and status socket."""
        for sock, (kind, (who, environ, pid, thread)) in self._pending.served():
            # Process ids may be equal on several hosts, and ranks may be threads of one process.
            half = self._halves.setdefault((pid, thread, str(who)), {})
            half[kind] = sock
            if len(half) == 2:
                del self._halves[pid, thread, str(who)]
                yield who, environ, half[b"c"], half[b"s"]

    def close(self) -> None:
        """Close the socket and all connections; a second call does nothing."""
        self.sock.close()
        self._pending.close()
        for half in self._halves.values():
            for sock in half.values():
                sock.close()


class RemoteWorkers(Workers):
    """Ranks of one launcher, which is a process of this host."""

    stdout: int | None = None  # target of the launcher's stdout; None for this process's
    n_last: int = 12  # lines of the launcher's output in an error
    drain_s: float = 1.0  # for the last lines of the launcher's processes

    def __init__(
        self, spec: LauncherSpec, entry: bytes, environ: Mapping[str, str], held: ExitStack
    ) -> None:
        super().__init__(spec.world_size, held, spec.stop_limit_s)
        self.process: subprocess.Popen[bytes] | None = None
        self.pipes: Pipes = Pipes()
        # Prints the launcher's lines, also between the calls of a pool.
        self._reader = threading.Thread(target=self._read, name="unisono-lines", daemon=True)
        self._is_closing = threading.Event()  # as other processes may hold the pipes
        self.last: deque[str] = deque(maxlen=self.n_last)
        self._spec, self._entry, self._environ = spec, entry, environ
        self._listener = _RankListener(spec, held)
        self.link: Link = self._listener.link
        self._begin = self._arrived_at = time.monotonic()
        self._ended_at, self._is_reported = 0.0, False  # the launcher's early end

    def start(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start the launcher."""
        environ = {**self._environ, **variables, **self.link.variables()}
        self.process = self.pipes.start(arguments, environ, stdout=self.stdout)
        self._reader.start()
        self._begin = self._arrived_at = time.monotonic()

    def print(self, target: int, line: bytes) -> None:
        """Print a line, and keep the last ones for errors."""
        self.last.append(line.decode(errors="replace").rstrip())
        show(target, line)

    def _read(self) -> None:
        while self.pipes.open and not self._is_closing.is_set():
            for target, line in self.pipes.read(_POLL_S):
                self.print(target, line)

    def has_ended(self, within_s: float | None = 0.0) -> bool:
        """Wait for the launcher's end, without a limit for None."""
        if self.process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
        return self.process.returncode is not None

    def last_lines(self, within_s: float = 1.0) -> str:
        """Return the launcher's last lines, after waiting up to `within_s` for more."""
        self._reader.join(within_s)
        return "\n".join(self.last).strip() or "(none)"

    def early_end(self, job: Job[Any]) -> LaunchError:
        """Return the error of a launcher that ended before its ranks were done."""
        assert self.process is not None
        # Connections of its ranks may end before the launcher itself does.
        code = self.process.returncode if self.has_ended(_TERM_S) else None
        how = "doesn't end" if code is None else f"ended with exit code {exit_code_of(code)}"
        connected = {worker.rank for worker in self.workers}
        missing = [rank for rank in job.late if rank not in connected]
        where = (
            f"though ranks {missing} hadn't connected"
            if missing
            else f"before {job.late} were done"
        )
        return LaunchError(
            f"{self._spec.name} {how}, {where}; its last output:\n{self.last_lines()}"
        )

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait briefly for any worker or the launcher, and record changes."""
        super().poll(job, min(until, time.monotonic() + _POLL_S))
        # A failure or the results of all ranks decide the job even if the launcher has ended.
        if not self.has_ended() or job.failures or not job.late:
            return
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        # Results of connected ranks may still arrive, until their channels have ended.
        are_silent = all(worker.is_silent for worker in self.workers)
        if not self._is_reported and (are_silent or now > self._ended_at + _TERM_S):
            self._is_reported = True  # once, as the error waits for the last lines
            job.stop(self.early_end(job))

    def wait_for_exits(self, job: Job[Any]) -> None:
        """Notify all ranks that the job is done, and wait for them and the launcher to exit."""
        self._listener.close()  # the job has its results, so no rank may join it now
        for worker in self.workers:
            with contextlib.suppress(OSError):  # the rank has ended
                messages.send(worker.channel, messages.DONE)
        super().wait_for_exits(job)
        until = time.monotonic() + (limit_of(self._spec.exit_s) or 0.0)  # never None
        while time.monotonic() < until and not self.has_ended(_POLL_S):
            if job.orders.received or any(worker.wait_status for worker in self.workers):
                break

    def end(self, job: Job[Any]) -> None:
        """End all ranks and the launcher, within seconds."""
        self._listener.close()
        super().end(job)
        self.end_launcher(is_by_itself=bool(self.workers))

    def end_launcher(self, is_by_itself: bool = False) -> None:
        """End the launcher's process group, and print its remaining lines."""
        if self.process is None:
            return
        first_s = _TERM_S if is_by_itself else 0.0
        # Each signal is sent after a wait; the last wait is for SIGKILL to take effect.
        for number, wait_s in ((signal.SIGTERM, first_s), (signal.SIGKILL, _TERM_S), (0, _TERM_S)):
            if self.has_ended(wait_s):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
        self.last_lines(self.drain_s)
        self._is_closing.set()
        self._reader.join()
        for target, line in self.pipes.rests():
            self.print(target, line)
        self.pipes.close()

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Return the error of a rank that ended without a report, or never connected."""
        error = super().lost(job, rank)
        status = next(worker.wait_status for worker in self.workers if worker.rank == rank)
        # If ranks are missing, the launcher's output explains more.
        is_whole = len(self.workers) >= self._spec.n_ranks
        return error if is_whole and status is not None else self.early_end(job)

    def _register(self, job: Job[Any], selector: BaseSelector) -> None:
        super()._register(job, selector)
        self._listener.register(selector)

    def _check_limits(self, job: Job[Any]) -> None:
        """Admit the ranks that have connected, and stop the job if some are late."""
        for arrival in self._listener.arrivals():
            self._admit_rank(job, *arrival)
        super()._check_limits(job)
        now, spec = time.monotonic(), self._spec
        if spec.limit_s is not None and job.late and now > self._begin + spec.limit_s:
            job.stop(LaunchError(f"ranks {job.late} were not done after {spec.limit_s:g} s"))
        if job.orders.received and not self.workers:
            job.stop(LaunchError("the job was ended before its ranks had connected"))
        # The first rank's start may take long, as in a queue; the others follow it.
        limit_s = _ARRIVE_S if self.workers else spec.start_s
        if len(self.workers) < spec.n_ranks and now > self._arrived_at + limit_s:
            missing = sorted(set(job.late) - {worker.rank for worker in self.workers})
            job.stop(LaunchError(f"ranks {missing} did not arrive in {limit_s:g} s"))

    def _admit_rank(
        self,
        job: Job[Any],
        who: _Who,
        environ: Mapping[str, str],
        channel: socket.socket,
        status: socket.socket,
    ) -> None:
        """Send a rank its task, unless the process isn't a rank of this job."""
        problem = self.problem_with(who)
        if problem:
            job.stop(LaunchError(problem))
        if problem or job.orders.received:  # after a signal to end, no rank begins
            channel.close()
            status.close()
            return
        assert isinstance(who, RankInfo)
        who = self.with_node(who)
        if not self.workers:
            self._arrived_at = time.monotonic()
        variables = {**self._environ, **environ}  # the rank's own have priority
        task = task_message(self._entry, who, variables, search_path(), os.getcwd())
        self.workers.append(Worker(who.rank, channel, status, task))
        if len(self.workers) == self._spec.n_ranks:
            self._listener.sock.close()  # all ranks have connected, and no other process may

    def problem_with(self, who: _Who) -> str:
        """Return why a process isn't a rank of this job; empty if it is."""
        if isinstance(who, RankInfo):
            if who.rank in [worker.rank for worker in self.workers]:
                return f"the launcher made two processes that are rank {who.rank}"
            if who.world_size == self.world_size:
                return ""
            who = f"rank {who.rank} of {who.world_size}"
        return (
            f"{self.world_size} ranks were asked for, but the launcher made a process that its "
            f"variables call {who or 'no rank'}: check the launcher"
        )

    def with_node(self, who: RankInfo) -> RankInfo:
        """Return a rank's info with its node, which some launchers don't pass to ranks."""
        return who


def run_function(
    entry: Callable[[RankInfo], Any],
    script: Script,
    spec: LauncherSpec,
    prepare: Callable[[Script, ExitStack], tuple[Sequence[str], Mapping[str, str]]],
    environ: Mapping[str, str],
    ranks: Callable[..., RemoteWorkers] = RemoteWorkers,
    *,
    join: bool = True,
) -> Any:
    """Run `entry` in ranks of a launcher, whose command line and variables `prepare` writes."""
    pickled = pickle_for_worker(entry)
    with ExitStack() as failing:
        # Closed if anything below fails; otherwise closed when the job ends.
        held = failing.enter_context(ExitStack())
        arguments, variables = prepare(replace(script, program=boot(), is_function=True), held)
        workers = ranks(spec, pickled, environ, held)
        first = (script.node_rank or 0) * (spec.n_own or 0)  # 0 if all ranks connect here
        expected = range(first, first + spec.n_ranks)
        # Without a grace time, signals end this process, and the ranks with it.
        job: Job[Any] = Job(workers, spec.world_size, expected, grace_s=script.grace_s or None)
        try:
            workers.start(dying_with(os.getpid(), spec.end_signal, list(arguments)), variables)
            if join:
                return job.join()
        except BaseException:  # also Ctrl-C: no rank may outlive this call
            job.terminate()
            raise
        failing.pop_all()  # without join, `RemoteWorkers.end` closes `held`
    return job
