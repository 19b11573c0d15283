"""The parent's handles of workers: processes with a channel and a status socket each."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.failure import signal_name
from unisono.launchers.job.job import Job, JobRanks
from unisono.launchers.job.signals import TO_SAVE
from unisono.tracebacks import hides

__tracebackhide__ = hides

_log = logging.getLogger(__name__)
_FLUSH_S = 0.3  # after END, before SIGTERM
_TERM_S = 1.2  # after SIGTERM, before SIGKILL
_KILL_S = 5.0  # after SIGKILL, before the fork server is ended, too
_NEWS = re.compile(rb"([0-9]+)([psecx])")
_EXIT_S = 5.0  # for `LastCalls` of ranks, after all results have come
_TICK_S = 1.0  # between two checks of limits, which no descriptor reports
_SAY_S = 2.0  # from the end of a channel to the news of its process
_MAKE_S = 300.0  # until the ranks are there, which includes importing torch for the first ones
_STOP_GRACE_S = 1.0  # for the more precise errors of ranks that wait for a stopped one
_TakeIn = Callable[[], None]


@dataclass(slots=True)
class Worker:
    """One worker process: its channel, its status socket, and its state."""

    rank: int
    channel: socket.socket
    status: socket.socket
    task: memoryview = field(default_factory=lambda: memoryview(b""))
    inbox: messages.Inbox = field(init=False)
    unread: bytes = b""
    asked_at: float = field(default_factory=time.monotonic)
    pid: int | None = None
    refusal: int | None = None
    wait_status: int | None = None
    has_ended: bool = False
    is_silent: bool = False
    stopped_by: int | None = None
    stopped_s: float = 0.0

    def __post_init__(self) -> None:
        self.inbox = messages.Inbox(self.channel)

    def signal(self, number: int) -> None:
        """Send it a signal through its parent process."""
        with contextlib.suppress(OSError):
            self.status.send(bytes([number]), socket.MSG_DONTWAIT)

    def send_task(self) -> None:
        """Send what is left of its task, as far as there is room."""
        with contextlib.suppress(OSError):  # its end is found when its channel is read
            if self.task:
                sent = self.channel.send(self.task, socket.MSG_DONTWAIT)
                self.task = self.task[sent:]

    def close(self) -> None:
        """Close its sockets, which ends it."""
        self.channel.close()
        self.status.close()


class Workers(JobRanks):
    """Processes of one node, or of all, that run one function."""

    takes: Sequence[int] = TO_SAVE

    def __init__(self, world_size: int, held: ExitStack, stop_limit_s: float) -> None:
        self.workers: list[Worker] = []
        self.world_size: int = world_size
        self.fork_server: subprocess.Popen[bytes] | None = None
        self.answers: list[tuple[int, bytes, bytes]] = []
        """Messages of ranks that stay: rank, kind and body."""
        self._held = held
        self._stop_limit_s = stop_limit_s + _STOP_GRACE_S
        self._begin = self._looked_at = self._roused_at = time.monotonic()

    def are_starting(self) -> bool:
        """Return whether a worker hasn't its task yet."""
        return any(worker.task for worker in self.workers)

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait a little for news of any worker, and record it."""
        left = min(_TICK_S, until - time.monotonic())
        with selectors.DefaultSelector() as selector:
            self._register(job, selector)
            ready = [key.data for key, _ in selector.select(max(0.0, left))]
        for take_in in ready:
            take_in()
        self._look_after(job)

    def signal(self, number: int) -> None:
        """Signal all workers that still run, stopped ones too."""
        self._signal(number)
        self._signal(signal.SIGCONT)  # a stopped process gets another signal once it continues

    def see_out(self, job: Job[Any]) -> None:
        """Wait for the workers' last calls: see `LastCalls`."""
        self._run(job, _EXIT_S)

    def end(self, job: Job[Any]) -> None:
        """End all workers that still run, within seconds."""
        self._roused_at = 0.0  # workers may get it from their fork server alone
        for worker in self.workers:
            if not worker.has_ended:
                with contextlib.suppress(OSError):
                    worker.channel.setblocking(False)
                    messages.send(worker.channel, messages.END)
        if job.orders.came:  # their grace is over
            self._signal(signal.SIGKILL)
        self._run(job, _FLUSH_S)
        for worker in self.workers:  # one that hasn't started ends when its sockets are closed
            worker.has_ended = worker.has_ended or worker.pid is None
        self.signal(signal.SIGTERM)
        self._run(job, _TERM_S)
        self._signal(signal.SIGKILL)
        self._run(job, _KILL_S)
        self._give_up(job)
        for worker in self.workers:
            worker.close()
        self._held.close()

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Return the error of a worker that ended without a report."""
        worker = next(worker for worker in self.workers if worker.rank == rank)
        limit = time.monotonic() + _SAY_S
        while not worker.has_ended and time.monotonic() < limit:
            self.poll(job, limit)
        who = f"rank {rank} of {self.world_size}"
        if worker.refusal is not None:
            return LaunchError(f"{who} can't be made: {os.strerror(worker.refusal)}; see ulimit -a")
        if worker.wait_status is None:
            return WorkerFailedError(f"{who} is lost: the process that made it died", rank)
        code = os.waitstatus_to_exitcode(worker.wait_status)
        if code < 0:
            name = signal_name(-code)
            return WorkerFailedError(f"{who} was ended by {name}", rank, signal=name)
        return WorkerFailedError(
            f"{who} ended with exit code {code} before its work was done", rank, code
        )

    def why_late(self) -> str:
        """Return which workers are stopped, for an error."""
        stopped = [worker for worker in self.workers if worker.stopped_by is not None]
        return "".join(
            f"; rank {w.rank} was stopped by {signal_name(w.stopped_by or 0)}" for w in stopped
        )

    def _give_up(self, job: Job[Any]) -> None:
        """Warn about workers that signals don't end, or that their fork server can't reap."""
        left = [worker for worker in self.workers if not worker.has_ended]
        if not left:
            return
        if self.fork_server is not None:
            self.fork_server.kill()  # the kernel ends its children with it
        self._run(job, _SAY_S)
        left = [worker for worker in left if not worker.has_ended]
        for worker in left:
            worker.has_ended = True
        if left:
            _log.warning(
                "ranks %s of %d (processes %s) don't end, though they were killed",
                [worker.rank for worker in left], self.world_size, [w.pid for w in left],
            )  # fmt: skip

    def _run(self, job: Job[Any], limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while any(not worker.has_ended for worker in self.workers) and time.monotonic() < limit:
            self.poll(job, limit)

    def _signal(self, number: int) -> None:
        for worker in self.workers:
            if not worker.has_ended:
                worker.signal(number)

    def _register(self, job: Job[Any], selector: selectors.BaseSelector) -> None:
        """Register sockets that may have news, with the functions that read them."""
        for worker in self.workers:
            if not worker.has_ended:
                look: _TakeIn = partial(self._look_at, job, worker)
                selector.register(worker.status, selectors.EVENT_READ, look)
            if not worker.is_silent:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.task else 0)
                selector.register(worker.channel, events, partial(self._talk, job, worker))

    def _look_after(self, job: Job[Any]) -> None:
        """Wake a stopped fork server, and check the limits of time."""
        now = time.monotonic()
        # If this process was stopped too, the time counts for nobody.
        passed = min(now - self._looked_at, 2 * _TICK_S)
        self._looked_at = now
        for worker in self.workers:
            if worker.stopped_by is not None:
                worker.stopped_s += passed
                if worker.stopped_s > self._stop_limit_s and worker.rank not in job.results:
                    job.stop(self._stopped(worker))
        unmade = [
            w.rank
            for w in self.workers
            if w.pid is None and not w.has_ended and now > w.asked_at + _MAKE_S
        ]
        if unmade:
            job.stop(
                LaunchError(
                    f"ranks {unmade} of {self.world_size} weren't there after {_MAKE_S:g} s"
                )
            )
        if self.fork_server is not None and now > self._roused_at + _TICK_S:
            self._roused_at = now
            with contextlib.suppress(OSError):
                self.fork_server.send_signal(signal.SIGCONT)  # it serves no purpose while stopped

    def _talk(self, job: Job[Any], worker: Worker) -> None:
        worker.send_task()
        self._hear(job, worker)

    def _hear(self, job: Job[Any], worker: Worker) -> bool:
        """Record one message, and return whether a whole one had arrived."""
        try:
            message = worker.inbox.take()
        except EOFError:
            self._silence(job, worker)
            return False
        if message is None:
            return False
        if message[0] == messages.RESULT:
            job.succeed(worker.rank, message[1])
        elif message[0] == messages.ERROR:
            job.fail(worker.rank, pickle.loads(message[1]))
        else:
            self.answers.append((worker.rank, *message))
        return True

    def _silence(self, job: Job[Any], worker: Worker) -> None:
        """Record that nothing more arrives on a worker's channel."""
        worker.is_silent = True
        if worker.rank not in job.results:
            job.fail(worker.rank, None)

    def _look_at(self, job: Job[Any], worker: Worker) -> None:
        """Record the state of a worker's process: started, stopped, continued or ended."""
        come = b""
        with contextlib.suppress(OSError):
            come = worker.status.recv(4096, socket.MSG_DONTWAIT)
        worker.unread += come
        news = [(int(number), kind) for number, kind in _NEWS.findall(worker.unread)]
        worker.unread = _NEWS.sub(b"", worker.unread)
        for number, kind in news:
            self._take_news(job, worker, number, kind)
        if not come and not worker.has_ended:
            self._bury(job, worker, None)

    def _take_news(self, job: Job[Any], worker: Worker, number: int, kind: bytes) -> None:
        if kind == b"p":
            worker.pid = number
        elif kind == b"s":
            worker.stopped_by, worker.stopped_s = number, 0.0
            _log.warning(
                "rank %d of %d was stopped by %s, and goes on after SIGCONT",
                worker.rank, self.world_size, signal_name(number),
            )  # fmt: skip
        elif kind == b"c":
            worker.stopped_by = None
        elif kind == b"x":
            worker.refusal = number
            self._bury(job, worker, None)
        else:
            self._bury(job, worker, number)

    def _bury(self, job: Job[Any], worker: Worker, wait_status: int | None) -> None:
        # All that it sent has arrived; a child of it may hold the channel open forever.
        while not worker.is_silent and self._hear(job, worker):
            pass
        worker.wait_status = wait_status
        worker.has_ended = True
        self._silence(job, worker)

    def _stopped(self, worker: Worker) -> WorkerFailedError:
        name = signal_name(worker.stopped_by or 0)
        return WorkerFailedError(
            f"rank {worker.rank} of {self.world_size} was stopped by {name}, and hasn't gone on "
            f"for {worker.stopped_s:.3g} s",
            worker.rank,
            signal=name,
        )
