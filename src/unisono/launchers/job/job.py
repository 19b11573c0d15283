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
import struct
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any, Generic, Protocol, TypeVar

import cloudpickle

from unisono.deadlines import end_of_block, overdue
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.process_state import why_aborted
from unisono.launchers.job.worker import Failure
from unisono.tracebacks import hides

__all__ = ("Job", "Maker", "Worker", "raised")

__tracebackhide__ = hides

T = TypeVar("T")
_log = logging.getLogger(__name__)
_PRIMARY_WAIT_S = 1.0  # how long an error that only reports a peer's waits for the peer's own
_FLUSH_S = 0.3  # after END, before SIGTERM
_TERM_S = 1.2  # after SIGTERM, before SIGKILL
_KILL_S = 5.0  # after SIGKILL, before the process that makes ranks is ended, too
_NEWS = re.compile(rb"([0-9]+)([psecx])")
_EXIT_S = 5.0  # for exit handlers, after all results have come
_FD = struct.Struct("i")
_TICK_S = 1.0  # between two looks at what no descriptor tells
_SAY_S = 2.0  # from a rank's end until the process that made it says how it ended
_MAKE_S = 300.0  # until the ranks are there, which includes importing torch for the first ones
_STOP_GRACE_S = 1.0  # ranks that wait for one that is stopped know more: their error comes first
_GRACE_S = 0.5  # the same for the deadline of a block


class Maker(Protocol):
    """The child of this process that makes ranks; a ``Popen`` is one."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and reap it. Local.

        Raises:
            TimeoutExpired: it goes on.
        """

    def send_signal(self, sig: int) -> None:
        """Signal it unless it has ended. Local."""

    def kill(self) -> None:
        """End it. Local."""


@dataclass(slots=True)
class Worker:
    """One worker process: its channel, its status socket, and what came of it.

    Args:
        rank: its global rank.
        channel: to and from its inside.
        status: to and from the process that makes it.
        task: what it hasn't been sent yet.
    """

    rank: int
    channel: socket.socket
    status: socket.socket
    task: memoryview = field(default_factory=lambda: memoryview(b""))
    inbox: messages.Inbox = field(init=False)
    heard: list[Any] = field(default_factory=list)
    result: bytes | None = None
    failure: Failure | None = None
    said: bytes = b""
    pid: int | None = None
    pidfd: int | None = None
    refusal: int | None = None
    wait_status: int | None = None
    ended_at: float | None = None
    has_ended: bool = False
    is_silent: bool = False
    stopped_by: int | None = None
    stopped_s: float = 0.0

    def __post_init__(self) -> None:
        self.inbox = messages.Inbox(self.channel)

    @property
    def has_failed(self) -> bool:
        """Whether it raised, or ended without a result."""
        return self.failure is not None or (self.has_ended and self.result is None)

    @property
    def is_secondary(self) -> bool:
        """Whether its failure only reports that of another rank."""
        return self.failure is not None and self.failure.is_secondary

    def signal(self, number: int) -> None:
        """Signal it, whatever state the process is in that made it. Local."""
        with contextlib.suppress(OSError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            elif not self.has_ended:
                self.status.send(bytes([number]), socket.MSG_DONTWAIT)

    def listen(self) -> bytes:
        """Take in what the process that makes it says, a descriptor of its process among it. Local.

        Returns:
            What came; nothing once nobody is there to say anything.
        """
        how = (4096, socket.CMSG_LEN(_FD.size), socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError):
            # In one call of C: an interrupt can't come between having a descriptor and keeping it.
            self.heard.extend(starmap(self.status.recvmsg, (how,)))
        come = b""
        while self.heard:
            data, ancillary = self.heard[0][:2]
            for _, _, number in ancillary:
                self.pidfd = int.from_bytes(number[: _FD.size], sys.byteorder)
            come += data
            self.said += data
            del self.heard[0]
        return come

    def close(self) -> None:
        """Close what leads to it. Local; harmless the second time."""
        self.listen()
        self.channel.close()
        self.status.close()
        pidfd, self.pidfd = self.pidfd, None  # before it is closed: Ctrl-C may lead here again
        if pidfd is not None:
            os.close(pidfd)


class Job(Generic[T]):
    """Workers of one node that run one function; the handle that ``spawn(join=False)`` returns.

    Args:
        workers: in the order of local rank; may be added before it is joined.
        world_size: ranks in the whole job.
        held: closed when the last worker has ended; holds the rendezvous.
        stop_limit_s: seconds for which a worker may be stopped by a signal.
    """

    def __init__(
        self, workers: list[Worker], world_size: int, held: ExitStack, stop_limit_s: float
    ) -> None:
        self.workers = workers
        self._world_size = world_size
        self._held = held
        self._stop_limit_s = stop_limit_s + _STOP_GRACE_S
        self._failed: list[Worker] = []
        self._error: LaunchError | None = None
        self._begin = self._looked_at = self._roused_at = time.monotonic()
        self.maker: Maker | None = None

    def join(self, timeout: float | None = None) -> list[T]:
        """Wait for all workers.

        Local. Within ``deadline`` the job has the time that is left there.

        Args:
            timeout: seconds to wait; None for no limit but that of the block.

        Returns:
            What the function returned, by rank.

        Raises:
            WorkerFailedError: the first failure; all workers have been ended.
            CollectiveTimeoutError: the block's deadline is over; all workers have been ended.
            LaunchError: the timeout passed, and the job goes on and may be joined again; or the
                workers can't be made.
        """
        self.finish(timeout)
        return [self._value(worker) for worker in self.workers]

    def finish(self, timeout: float | None = None) -> None:
        """Wait for all workers as `join` does, and leave their results as they came.

        Local.

        Args:
            timeout: as for `join`.

        Raises:
            LaunchError: as for `join`.
            CollectiveTimeoutError: as for `join`.
        """
        limit = None if timeout is None else time.monotonic() + timeout
        try:
            while self._error is None and any(worker.result is None for worker in self.workers):
                if self._failed and self._is_decided():
                    self._error = self._verdict()
                    break
                if limit is not None and time.monotonic() >= limit:
                    raise LaunchError(
                        f"ranks {self._late()} haven't finished in time: join again, or terminate()"
                    )
                self._poll(limit, self._require_time(_GRACE_S))
            if self._error is None:
                self._run(time.monotonic() + _EXIT_S)
        except LaunchError:
            raise
        except BaseException:  # Ctrl-C above all: nobody is left behind
            self.terminate()
            raise
        self.terminate()
        if self._error is not None:
            raise _copy(self._error)

    def is_decided(self, within_s: float) -> bool:
        """Tell whether nothing more is to be waited for: all have a result, or one has failed.

        Local.

        Args:
            within_s: seconds that it may take.
        """
        limit = time.monotonic() + within_s
        while self._error is None and not self._failed and self._late():
            if time.monotonic() >= limit:
                return False
            self._poll(limit)
        return True

    def send_tasks(self) -> None:
        """Wait until every worker has its task, or one has failed.

        Local.

        Raises:
            CollectiveTimeoutError: the block's deadline is over; all workers have been ended.
            LaunchError: the workers can't be made in time.
        """
        while any(worker.task for worker in self.workers) and not self._failed:
            self._poll(self._require_time(0.0))
            if self._error is not None:
                self.terminate()
                raise _copy(self._error)

    def terminate(self) -> None:
        """End all workers that still run, within seconds.

        Local.
        """
        late = self._late()
        self._roused_at = 0.0  # in case the workers hear of it from their maker alone
        if late and self._error is None:
            self._error = self._verdict() if self._failed else self._was_told_to_end(late)
        for worker in self.workers:
            if not worker.has_ended:
                with contextlib.suppress(OSError):
                    worker.channel.setblocking(False)
                    messages.send(worker.channel, messages.END)
        self._run(time.monotonic() + _FLUSH_S)
        for worker in self.workers:  # one that isn't there yet ends when its sockets are closed
            worker.has_ended = worker.has_ended or worker.pid is None
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a stopped process hears SIGTERM once it goes on
        self._run(time.monotonic() + _TERM_S)
        self._signal(signal.SIGKILL)
        self._run(time.monotonic() + _KILL_S)
        self._give_up()
        for worker in self.workers:
            worker.close()
        self._held.close()

    def _give_up(self) -> None:
        """Leave workers that no signal ends, or that their maker can't reap. Local."""
        left = [worker for worker in self.workers if not worker.has_ended]
        if not left:
            return
        if self.maker is not None:
            self.maker.kill()  # the kernel ends its children with it
        self._run(time.monotonic() + _SAY_S)
        left = [worker for worker in left if not worker.has_ended]
        for worker in left:
            worker.has_ended = True
        if left:
            _log.warning(
                "ranks %s of %d (processes %s) don't end, though they were killed",
                [worker.rank for worker in left], self._world_size, [w.pid for w in left],
            )  # fmt: skip

    def _late(self) -> list[int]:
        return [worker.rank for worker in self.workers if worker.result is None]

    def _was_told_to_end(self, late: list[int]) -> WorkerFailedError:
        return WorkerFailedError(
            f"the job was ended before ranks {late} of {self._world_size} were done", late[0]
        )

    def _require_time(self, grace_s: float) -> float | None:
        """Give when the time of the block is over; end all and raise once it is."""
        until = end_of_block()
        if until is None or time.monotonic() < until + grace_s:
            return None if until is None else until + grace_s
        late = self._late()
        stopped = [worker for worker in self.workers if worker.stopped_by is not None]
        text = overdue(late, self._world_size)
        for worker in stopped:
            text += f"; rank {worker.rank} was stopped by {_name(worker.stopped_by)}"
        self.terminate()
        raise CollectiveTimeoutError(text)

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
            self._poll(limit)
        return True

    def _run(self, limit: float) -> None:
        while any(not worker.has_ended for worker in self.workers) and time.monotonic() < limit:
            self._poll(limit)

    def _signal(self, number: int) -> None:
        for worker in self.workers:
            if not worker.has_ended:
                worker.signal(number)

    def _poll(self, *limits: float | None) -> None:
        """Wait a little for news of any worker, and take it in."""
        now = time.monotonic()
        left = min([_TICK_S, *(limit - now for limit in limits if limit is not None)])
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                self._register(selector, worker)
            ready = [key.data for key, _ in selector.select(max(0.0, left))]
        for worker, take_in in ready:
            take_in(worker)
        self._look_after()
        for worker in self.workers:
            if worker.has_failed and worker not in self._failed:
                self._failed.append(worker)

    def _register(self, selector: selectors.BaseSelector, worker: Worker) -> None:
        if not worker.has_ended:
            selector.register(worker.status, selectors.EVENT_READ, (worker, self._look_at))
            if worker.pidfd is not None and worker.ended_at is None:
                selector.register(worker.pidfd, selectors.EVENT_READ, (worker, self._note_end))
        if not worker.is_silent:
            events = selectors.EVENT_READ
            if worker.task:
                events |= selectors.EVENT_WRITE
            selector.register(worker.channel, events, (worker, self._talk))

    def _look_after(self) -> None:
        """See to what no descriptor tells: a maker that is stopped, and times that have passed."""
        now = time.monotonic()
        # If this process was stopped too, the time counts for nobody.
        passed = min(now - self._looked_at, 2 * _TICK_S)
        self._looked_at = now
        for worker in self.workers:
            if worker.stopped_by is not None:
                worker.stopped_s += passed
                if worker.stopped_s > self._stop_limit_s and worker.result is None:
                    self._error = self._error or self._stopped(worker)
            if worker.ended_at is not None and now > worker.ended_at + _SAY_S:
                self._bury(worker, None)
        unmade = [w.rank for w in self.workers if w.pid is None and not w.has_ended]
        if unmade and now > self._begin + _MAKE_S:
            self._error = self._error or LaunchError(
                f"ranks {unmade} of {self._world_size} weren't there after {_MAKE_S:g} s"
            )
        if self.maker is not None and now > self._roused_at + _TICK_S:
            self._roused_at = now
            with contextlib.suppress(OSError):
                self.maker.send_signal(signal.SIGCONT)  # nobody but us has a use for its stop

    def _talk(self, worker: Worker) -> None:
        with contextlib.suppress(OSError):  # its end is seen when it is listened to
            if worker.task:
                sent = worker.channel.send(worker.task, socket.MSG_DONTWAIT)
                worker.task = worker.task[sent:]
        self._hear(worker)

    def _hear(self, worker: Worker) -> bool:
        """Take in one message, and tell whether there was one, and the whole of it."""
        try:
            message = worker.inbox.take()
        except EOFError:
            worker.is_silent = True
            return False
        if message is None:
            return False
        if message[0] == messages.RESULT:
            worker.result = message[1]
        else:
            worker.failure = pickle.loads(message[1])
        return True

    def _look_at(self, worker: Worker) -> None:
        """Take in what became of a worker's process: it is there, stopped, goes on, has ended."""
        come = worker.listen()
        news = [(int(number), kind) for number, kind in _NEWS.findall(worker.said)]
        worker.said = _NEWS.sub(b"", worker.said)
        for number, kind in news:
            self._take_news(worker, number, kind)
        if not come and not worker.has_ended:
            self._bury(worker, None)

    def _take_news(self, worker: Worker, number: int, kind: bytes) -> None:
        if kind == b"p":
            worker.pid = number
        elif kind == b"s":
            worker.stopped_by, worker.stopped_s = number, 0.0
            _log.warning(
                "rank %d of %d was stopped by %s, and goes on after SIGCONT",
                worker.rank, self._world_size, _name(number),
            )  # fmt: skip
        elif kind == b"c":
            worker.stopped_by = None
        elif kind == b"x":
            worker.refusal = number
            self._bury(worker, None)
        else:
            self._bury(worker, number)

    def _note_end(self, worker: Worker) -> None:
        """Take note that a process has ended; how is said by the one that made it."""
        worker.ended_at = time.monotonic()
        self._roused_at = 0.0

    def _bury(self, worker: Worker, wait_status: int | None) -> None:
        # All that it sent is there; a child that it left behind may hold the channel open forever.
        while not worker.is_silent and self._hear(worker):
            pass
        worker.is_silent = True
        worker.wait_status = wait_status
        worker.has_ended = True

    def _is_alone(self) -> bool:
        """Tell whether the maker is dead, whose connections close a moment before, and reap it."""
        if self.maker is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.maker.wait(_SAY_S)
            return True
        return False

    def _stopped(self, worker: Worker) -> WorkerFailedError:
        name = _name(worker.stopped_by)
        return WorkerFailedError(
            f"rank {worker.rank} of {self._world_size} was stopped by {name}, and hasn't gone on "
            f"for {worker.stopped_s:.3g} s",
            worker.rank,
            signal=name,
        )

    def _verdict(self) -> LaunchError:
        """Say who failed first; asked for before anybody is ended by this process."""
        first = next((w for w in self._failed if not w.is_secondary), self._failed[0])
        who = f"rank {first.rank} of {self._world_size}"
        failure = first.failure
        if failure is not None:
            return raised(first.rank, self._world_size, failure)
        if first.refusal is not None:
            return LaunchError(f"{who} can't be made: {os.strerror(first.refusal)}; see ulimit -a")
        if first.wait_status is None:
            why = "died" if self._is_alone() else "doesn't say how it ended"
            return WorkerFailedError(f"{who} is lost: the process that made it {why}", first.rank)
        code = os.waitstatus_to_exitcode(first.wait_status)
        if code < 0:
            name = _name(-code)
            why = why_aborted() if name == "SIGABRT" else ""
            return WorkerFailedError(f"{who} was ended by {name}{why}", first.rank, signal=name)
        return WorkerFailedError(
            f"{who} ended with exit code {code} before its work was done", first.rank, code
        )


def _copy(error: LaunchError) -> LaunchError:
    """Copy an error for the caller: raised itself it would hold the job, and the job holds it."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def _name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def raised(rank: int, world_size: int, failure: Failure, who: str = "") -> WorkerFailedError:
    """Make the parent's error of what a replica raised, or `who` else. Local."""
    who = who or f"rank {rank} of {world_size}"
    error = WorkerFailedError(
        failure.text(who),
        rank=rank,
        exit_code=failure.exit_code,
        traceback=failure.traceback,
    )
    if failure.cause is not None:
        with contextlib.suppress(Exception):  # the class may not exist here
            error.__cause__ = pickle.loads(failure.cause)
    return error
