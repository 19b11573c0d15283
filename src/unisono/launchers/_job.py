"""One job of worker processes as the parent sees it: results, failures, the end of everybody."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import re
import selectors
import signal
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers import _channel
from unisono.launchers._worker import Failure

__all__ = ("Job", "Worker", "raised")

_log = logging.getLogger(__name__)
_PRIMARY_WAIT_S = 1.0  # how long an error that only reports a peer's waits for the peer's own
_FLUSH_S = 0.3  # after END, before SIGTERM
_TERM_S = 1.2  # after SIGTERM, before SIGKILL
_STATUS = re.compile(rb"([0-9]+)([se])")
_EXIT_S = 5.0  # for exit handlers, after all results have come


@dataclass(slots=True)
class Worker:
    """One worker process: its channel, its status socket, and what came of it."""

    rank: int
    channel: socket.socket
    status: socket.socket
    inbox: _channel.Inbox = field(init=False)
    result: bytes | None = None
    failure: Failure | None = None
    said: bytes = b""
    wait_status: int | None = None
    has_ended: bool = False
    is_silent: bool = False

    def __post_init__(self) -> None:
        self.inbox = _channel.Inbox(self.channel)

    @property
    def has_failed(self) -> bool:
        """Whether it raised, or ended without a result."""
        return self.failure is not None or (self.has_ended and self.result is None)

    @property
    def is_secondary(self) -> bool:
        """Whether its failure only reports that of another rank."""
        return self.failure is not None and self.failure.is_secondary


class Job:
    """Workers of one node that run one function; the handle that ``spawn(join=False)`` returns.

    Args:
        workers: in the order of local rank.
        world_size: ranks in the whole job.
        held: closed when the last worker has ended; holds the rendezvous.
    """

    def __init__(self, workers: list[Worker], world_size: int, held: ExitStack) -> None:
        self._workers = workers
        self._world_size = world_size
        self._held = held
        self._failed: list[Worker] = []

    def join(self, timeout: float | None = None) -> list[Any]:
        """Wait for all workers.

        Local.

        Args:
            timeout: seconds to wait; None waits for ever.

        Returns:
            What the function returned, by rank.

        Raises:
            WorkerFailedError: the first failure; all workers have been ended.
            LaunchError: the timeout passed; the job goes on, and may be joined again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while any(worker.result is None for worker in self._workers):
                if self._failed and self._is_decided():
                    break
                self._step(deadline)
            if not self._failed:
                self._run(time.monotonic() + _EXIT_S)
        except LaunchError:
            raise
        except BaseException:  # Ctrl-C above all: nobody is left behind
            self.terminate()
            raise
        self.terminate()
        if self._failed:
            raise self._error()
        return [self._value(worker) for worker in self._workers]

    def terminate(self) -> None:
        """End all workers that still run, within seconds.

        Local.
        """
        for worker in self._workers:
            if not worker.has_ended:
                with contextlib.suppress(OSError):
                    worker.channel.setblocking(False)
                    _channel.send(worker.channel, _channel.END)
        self._run(time.monotonic() + _FLUSH_S)
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process hears SIGTERM once it goes on
        self._run(time.monotonic() + _TERM_S)
        self._signal(signal.SIGKILL)
        self._run(None)
        for worker in self._workers:
            worker.channel.close()
            worker.status.close()
        self._held.close()

    def _value(self, worker: Worker) -> Any:
        assert worker.result is not None
        try:
            return cloudpickle.loads(worker.result)
        except Exception as error:  # a constructor of the user's may raise anything
            raise WorkerFailedError(
                f"rank {worker.rank} of {self._world_size} returned a value that can't be "
                f"unpickled here: {type(error).__name__}: {error}",
                worker.rank,
            ) from error

    def _is_decided(self) -> bool:
        """Wait a little for a failure of its own kind where there are only reports of others'."""
        limit = time.monotonic() + _PRIMARY_WAIT_S
        while all(worker.is_secondary for worker in self._failed) and time.monotonic() < limit:
            self._poll(max(0.0, limit - time.monotonic()))
        return True

    def _run(self, limit: float | None) -> None:
        while any(not worker.has_ended for worker in self._workers):
            left = None if limit is None else limit - time.monotonic()
            if left is not None and left <= 0:
                return
            self._poll(left)

    def _step(self, deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            waiting = [worker.rank for worker in self._workers if worker.result is None]
            raise LaunchError(
                f"ranks {waiting} haven't finished in time: join again, or terminate()"
            )
        self._poll(left)

    def _signal(self, number: int) -> None:
        for worker in self._workers:
            if not worker.has_ended:
                with contextlib.suppress(OSError):
                    worker.status.send(bytes([number]))

    def _poll(self, timeout: float | None) -> None:
        """Wait for news of any worker, and take it in."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if not worker.has_ended:
                    selector.register(worker.status, selectors.EVENT_READ, (worker, self._look_at))
                if not worker.is_silent:
                    selector.register(worker.channel, selectors.EVENT_READ, (worker, self._hear))
            ready = [key.data for key, _ in selector.select(timeout)]
        for worker, take_in in ready:
            take_in(worker)
            if worker.has_failed and worker not in self._failed:
                self._failed.append(worker)

    def _hear(self, worker: Worker) -> bool:
        """Take in one message, and tell whether there was one, and the whole of it."""
        try:
            message = worker.inbox.take()
        except EOFError:
            worker.is_silent = True
            return False
        if message is None:
            return False
        if message[0] == _channel.RESULT:
            worker.result = message[1]
        else:
            worker.failure = pickle.loads(message[1])
        return True

    def _look_at(self, worker: Worker) -> None:
        """Take in what became of a worker's process: it was stopped, or has ended."""
        said = b""
        with contextlib.suppress(OSError):
            said = worker.status.recv(4096)
        worker.said += said
        told = _STATUS.findall(worker.said)
        worker.said = _STATUS.sub(b"", worker.said)
        for number in [int(number) for number, kind in told if kind == b"s"]:
            _log.warning(
                "rank %d of %d was stopped by %s, and goes on after SIGCONT",
                worker.rank, self._world_size, signal.Signals(number).name,
            )  # fmt: skip
        ends = [int(status) for status, kind in told if kind == b"e"]
        if ends or not said:
            self._bury(worker, ends[0] if ends else None)

    def _bury(self, worker: Worker, wait_status: int | None) -> None:
        # All that it sent is there; a child that it left behind may hold the channel open for ever.
        while self._hear(worker):
            pass
        worker.is_silent = True
        worker.wait_status = wait_status
        worker.has_ended = True

    def _error(self) -> WorkerFailedError:
        first = next((w for w in self._failed if not w.is_secondary), self._failed[0])
        who = f"rank {first.rank} of {self._world_size}"
        failure = first.failure
        if failure is not None:
            return raised(first.rank, self._world_size, failure)
        if first.wait_status is None:
            return WorkerFailedError(f"{who} is lost: the process that made it died", first.rank)
        code = os.waitstatus_to_exitcode(first.wait_status)
        if code < 0:
            name = signal.Signals(-code).name
            return WorkerFailedError(f"{who} was ended by {name}", first.rank, signal=name)
        return WorkerFailedError(
            f"{who} ended with exit code {code} before its work was done", first.rank, code
        )


def raised(rank: int, world_size: int, failure: Failure, who: str = "") -> WorkerFailedError:
    """Make the parent's error of what a replica raised, or `who` else. Local."""
    who = who or f"rank {rank} of {world_size}"
    error = WorkerFailedError(
        f"{who} raised {failure.summary}\n\n{failure.traceback}",
        rank=rank,
        exit_code=failure.exit_code,
        traceback=failure.traceback,
    )
    if failure.cause is not None:
        with contextlib.suppress(Exception):  # the class may not exist here
            error.__cause__ = pickle.loads(failure.cause)
    return error
