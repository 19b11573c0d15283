"""The parent's handles of workers: processes with a channel and a status socket each."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.failure import signal_name
from unisono.launchers.job.forkserver import Forked
from unisono.launchers.job.job import Job, JobRanks
from unisono.launchers.job.signals import TO_SAVE

_log = logging.getLogger(__name__)
_FLUSH_S = 0.3  # after END, before SIGTERM
_TERM_S = 1.2  # after SIGTERM, before SIGKILL
_KILL_S = 5.0  # after SIGKILL, before the fork server is ended, too
_EXIT_S = 5.0  # for `LastCalls` of ranks, after all results have arrived
_TICK_S = 1.0  # between checks of time limits, which make no socket readable
_STATUS_S = 2.0  # from the end of a channel to the report of its process's end
_MAKE_S = 300.0  # until all ranks have started; the first one may have to import torch
_STOP_GRACE_S = 1.0  # for the more precise errors of ranks that wait for a stopped one
_NO_TASK = memoryview(b"")


class Worker(Forked):
    """One worker process: its channel, its task, and its state."""

    def __init__(
        self, rank: int, channel: socket.socket, status: socket.socket, task: memoryview = _NO_TASK
    ) -> None:
        super().__init__(status)
        self.rank = rank
        self.channel = channel
        self.inbox: messages.Inbox = messages.Inbox(channel)
        self.task: memoryview = task  # what hasn't been sent of it
        self.asked_at: float = time.monotonic()  # when its process was requested
        self.is_silent: bool = False  # its channel has ended
        self.stopped_s: float = 0.0  # since a signal stopped its process

    def signal(self, *numbers: int) -> None:
        """Send the worker signals, through its parent process."""
        with contextlib.suppress(OSError):
            self.status.send(bytes(numbers), socket.MSG_DONTWAIT)

    def send_task(self) -> None:
        """Send the rest of the task, or as much as the socket accepts."""
        with contextlib.suppress(OSError):  # reading the channel will report the worker's exit
            if self.task:
                sent = self.channel.send(self.task, socket.MSG_DONTWAIT)
                self.task = self.task[sent:]

    def close(self) -> None:
        """Close the worker's sockets, which ends the worker."""
        self.channel.close()
        self.status.close()


class Workers(JobRanks):
    """Worker processes of one node, or of all nodes, that run one function."""

    forwarded: Sequence[int] = TO_SAVE

    def __init__(self, world_size: int, held: ExitStack, stop_limit_s: float) -> None:
        self.workers: list[Worker] = []
        self.world_size: int = world_size
        self.fork_server: subprocess.Popen[bytes] | None = None
        # Messages of a pool's ranks: rank, kind and body.
        self.answers: list[tuple[int, bytes, bytes]] = []
        self._held = held
        self._stop_limit_s = stop_limit_s + _STOP_GRACE_S
        self._checked_at = self._woken_at = time.monotonic()

    def are_starting(self) -> bool:
        """Return whether a worker hasn't received its whole task yet."""
        return any(worker.task for worker in self.workers)

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait briefly for any worker, and record changes."""
        left = min(_TICK_S, until - time.monotonic())
        # New at each call, as the sockets to watch, and their events, change between calls.
        with selectors.DefaultSelector() as selector:
            self._register(job, selector)
            ready = [key.data for key, _ in selector.select(max(0.0, left))]
        for read in ready:
            read()
        self._check_limits(job)

    def signal(self, number: int) -> None:
        """Signal all workers that still run, stopped ones too."""
        # A stopped process receives a signal other than SIGKILL only once it continues.
        for worker in self.running:
            worker.signal(number, signal.SIGCONT)

    def wait_for_exits(self, job: Job[Any]) -> None:
        """Wait for the workers to exit, after their `LastCalls`."""
        self.wait_for_ends(job, _EXIT_S)

    def end(self, job: Job[Any]) -> None:
        """End all workers that still run, within seconds."""
        self._woken_at = 0.0  # wake the fork server at once: a stopped one forwards no signals
        for worker in self.running:
            with contextlib.suppress(OSError):
                worker.channel.setblocking(False)  # a worker may not read
                messages.send(worker.channel, messages.END)
        if job.orders.received:  # the ranks have had the signal and their grace time
            self.signal(signal.SIGKILL)
        self.wait_for_ends(job, _FLUSH_S)
        for worker in self.workers:  # a worker that hasn't started ends with its sockets
            worker.has_ended = worker.has_ended or not worker.pid
        self.signal(signal.SIGTERM)
        self.wait_for_ends(job, _TERM_S)
        self.signal(signal.SIGKILL)
        self.wait_for_ends(job, _KILL_S)
        self._abandon(job)
        for worker in self.workers:
            worker.close()
        self._held.close()  # last, as the store must outlive every worker

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Return the error of a worker that ended without a report."""
        worker = next(worker for worker in self.workers if worker.rank == rank)
        limit = time.monotonic() + _STATUS_S
        while not worker.has_ended and time.monotonic() < limit:  # the channel may end first
            self.poll(job, limit)
        who = f"rank {rank} of {self.world_size}"
        if worker.refusal is not None:
            reason = os.strerror(worker.refusal)
            return LaunchError(f"{who} can't be created: {reason}; see ulimit -a")
        if worker.wait_status is None:
            return WorkerFailedError(f"{who} is lost: its parent process died", rank)
        code = os.waitstatus_to_exitcode(worker.wait_status)
        if code < 0:
            name = signal_name(-code)
            return WorkerFailedError(f"{who} was ended by {name}", rank, signal=name)
        return WorkerFailedError(
            f"{who} ended with exit code {code} before its work was done", rank, code
        )

    def why_late(self) -> str:
        """Return the stopped workers and their signals, as text for an error."""
        return "".join(
            f"; rank {worker.rank} was stopped by {signal_name(worker.stopped_by)}"
            for worker in self.workers
            if worker.stopped_by is not None
        )

    @property
    def running(self) -> list[Worker]:
        """The workers whose processes haven't ended."""
        return [worker for worker in self.workers if not worker.has_ended]

    def _abandon(self, job: Job[Any]) -> None:
        """Warn about workers that survive SIGKILL, or that their fork server can't reap."""
        if self.fork_server is not None and self.running:
            self.fork_server.kill()  # the kernel ends its children with it
        self.wait_for_ends(job, _STATUS_S)
        left = self.running
        for worker in left:
            worker.has_ended = True  # nothing waits for it any more
        if left:
            _log.warning(
                "ranks %s of %d (processes %s) don't end, though they were killed",
                [worker.rank for worker in left], self.world_size, [w.pid for w in left],
            )  # fmt: skip

    def wait_for_ends(self, job: Job[Any], limit_s: float) -> None:
        """Wait for all workers' processes to end."""
        limit = time.monotonic() + limit_s
        while self.running and time.monotonic() < limit:
            self.poll(job, limit)

    def _register(self, job: Job[Any], selector: selectors.BaseSelector) -> None:
        """Register each worker's sockets with the functions that read them."""
        for worker in self.workers:
            if not worker.has_ended:
                read_status = partial(self._read_status, job, worker)
                selector.register(worker.status, selectors.EVENT_READ, read_status)
            if not worker.is_silent:  # as an ended channel is always readable
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.task else 0)
                selector.register(worker.channel, events, partial(self._receive, job, worker))

    def _check_limits(self, job: Job[Any]) -> None:
        """Wake a stopped fork server, and stop the job once a worker's time is over."""
        now = time.monotonic()
        # Capped: if this process was stopped itself, workers aren't charged for that time.
        passed = min(now - self._checked_at, 2 * _TICK_S)
        self._checked_at = now
        for worker in self.workers:
            if worker.stopped_by is not None:
                worker.stopped_s += passed
                if worker.stopped_s > self._stop_limit_s and worker.rank not in job.results:
                    name = signal_name(worker.stopped_by)
                    text = f"rank {worker.rank} of {self.world_size} was stopped by {name}, and "
                    text += f"hasn't continued for {worker.stopped_s:.3g} s"
                    job.stop(WorkerFailedError(text, worker.rank, signal=name))
        unmade = [w.rank for w in self.running if not w.pid and now > w.asked_at + _MAKE_S]
        if unmade:
            who = f"ranks {unmade} of {self.world_size}"
            job.stop(LaunchError(f"{who} didn't start within {_MAKE_S:g} s"))
        if self.fork_server is not None and now > self._woken_at + _TICK_S:
            self._woken_at = now
            with contextlib.suppress(OSError):
                self.fork_server.send_signal(signal.SIGCONT)  # nothing else would continue it

    def _receive(self, job: Job[Any], worker: Worker) -> bool:
        """Send the rest of a task; record one message, and return whether a whole one had come."""
        worker.send_task()
        try:
            message = worker.inbox.take()
        except EOFError:
            self._record_silence(job, worker)
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

    def _record_silence(self, job: Job[Any], worker: Worker) -> None:
        """Record that nothing more arrives on a worker's channel."""
        worker.is_silent = True
        if worker.rank not in job.results:
            job.fail(worker.rank, None)

    def _read_status(self, job: Job[Any], worker: Worker) -> None:
        """Record whether a worker's process was stopped, or has ended, after its last messages."""
        before = worker.stopped_by
        worker.read_status()
        if worker.stopped_by not in (None, before):
            worker.stopped_s = 0.0
            _log.warning(
                "rank %d of %d was stopped by %s, and continues after SIGCONT",
                worker.rank, self.world_size, signal_name(worker.stopped_by),
            )  # fmt: skip
        if worker.has_ended:
            # All messages have arrived. The channel's end may not arrive, since a child process of
            # the worker may hold the channel open.
            while not worker.is_silent and self._receive(job, worker):
                pass
            self._record_silence(job, worker)
