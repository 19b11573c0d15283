"""The pool's side of its replicas, which are ranks of a job that isn't over."""

from __future__ import annotations

import math
import os
import pickle
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from traceback import FrameSummary, walk_stack
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S, end_of_block
from unisono.errors import CollectiveTimeoutError, LaunchError
from unisono.launchers.job import channel
from unisono.launchers.job.job import Job
from unisono.launchers.job.worker_handles import Worker, Workers
from unisono.lifecycle import run_to_end, start_to_stay
from unisono.model.contract import ComputationModel
from unisono.pool import worker as inside
from unisono.recording import stack_signal
from unisono.tracebacks import frame_of, is_ours

_QUIT_S = 0.3  # for threads to end after the abort of their context
_LEAVE_S = 1.0  # for idle replicas to confirm that they end
_STACK_S = 1.0  # for all processes to write their stacks
_MIN_STACK_S = 0.1  # for each of them, even if the earlier ones took all that time
# Modules of ours that run a replica's function, but wait for no other rank.
_NEVER_WAITS = re.compile(
    r"/unisono/(testing|notebook|pool|launchers|pickling\.py|tracebacks\.py)\b"
)
_Answer = tuple[int, bytes, bytes]  # rank, kind and body


class Replicas:
    """One set of replicas, all of which have reported that they are ready."""

    def __init__(
        self, size: int, backend: str | None, options: dict[str, Any], limit: float | None
    ) -> None:
        self._size = size
        # By rank: process, Python's and the kernel's id of the thread, facts of `stack_signal`.
        self._ids: dict[int, tuple[int, int, int, Mapping[str, int]]] = {}
        job = start_to_stay(backend, inside.serve, (os.getpid(),), size, **options)
        # None means that the model starts its ranks in this process.
        self._job: Job[Any] = job or Job(_Threads(backend, size, options), size)
        assert isinstance(self._job.ranks, Workers)
        self._workers: Workers = self._job.ranks
        weakref.finalize(self, _end, self._job, os.getpid())
        try:
            while late := sorted(set(range(size)) - self._ids.keys()):
                if limit is not None and time.monotonic() >= limit:
                    raise CollectiveTimeoutError(
                        f"the replicas of ranks {late} of {size} weren't ready when the "
                        "deadline was over"
                    )
                # A replica's first message is READY, and a task is sent only after that.
                self._ids |= {rank: pickle.loads(body) for rank, _, body in self.news(limit)}
        except BaseException:  # Ctrl-C too: no replica is left behind
            self._job.terminate()
            raise

    @property
    def pids(self) -> list[int]:
        """Process of each replica, by rank; the pool's own if it is a thread."""
        return [self._ids[rank][0] for rank in range(self._size)]

    @property
    def are_processes(self) -> bool:
        """Whether each replica is a process of its own, and not a thread of this one."""
        return os.getpid() not in self.pids

    def thread_of(self, rank: int) -> int:
        """Return Python's id of the thread that runs a replica's calls."""
        return self._ids[rank][1]

    def has_ended(self) -> bool:
        """Return whether a replica is gone."""
        # `peek` returns b"" once the replica's end of the channel is closed, None if it is quiet.
        return any(w.has_ended or channel.peek(w.channel) == b"" for w in self._workers.workers)

    def watch(self) -> None:
        """Record the ends of idle replicas."""
        # The status sockets show it; a replica's channel may be held open by its child process.
        if any(channel.peek(worker.status) is not None for worker in self._workers.workers):
            self._job.poll(time.monotonic())

    def send(self, rank: int, body: bytes) -> None:
        """Send a replica its next task, as far as its channel has room; `news` sends the rest."""
        worker = self._worker(rank)
        worker.task = channel.task(body)
        worker.send_task()

    def news(self, until: float | None) -> list[_Answer]:
        """Return the answers that arrive until then; raise once a replica has died."""
        workers = self._workers
        if not workers.answers:
            self._job.poll(until)
        # Answers that arrived before a death come first.
        if not workers.answers:
            self._job.require_ranks()
        answers, workers.answers = workers.answers, []
        return answers

    def signal(self, ranks: Iterable[int], number: int) -> None:
        """Send a signal to replicas that are processes."""
        for rank in ranks if self.are_processes else ():
            self._worker(rank).signal(number)

    def may_wait(self, ranks: Iterable[int]) -> bool:
        """Return whether one of these replicas may wait for another one, or doesn't answer."""
        until = time.monotonic() + _STACK_S
        stacks = (self._stack(rank, until) for rank in ranks)
        return any(s is None or any(_may_wait(frame.filename) for frame in s) for s in stacks)

    def stacks(self, ranks: Iterable[int]) -> dict[int, list[FrameSummary]]:
        """Return the stacks of busy replicas, outermost first; empty without an answer."""
        until = time.monotonic() + _STACK_S
        return {rank: self._stack(rank, until) or [] for rank in ranks}

    def _stack(self, rank: int, until: float) -> list[FrameSummary] | None:
        """Return the stack of a replica, outermost first; None without an answer."""
        pid, thread_id, native_id, facts = self._ids[rank]
        if pid == os.getpid():
            frame = frame_of(thread_id)
            walked = () if frame is None else walk_stack(frame)
            frames = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in walked]
        else:
            limit_s = max(until - time.monotonic(), _MIN_STACK_S)
            text = stack_signal.ask(pid, facts, native_id, limit_s)
            if text is None:
                return None
            frames = stack_signal.parse(text)
        files = [file for file, *_ in frames]
        # Leave out our own frames that called the function; they are the outermost ones.
        called = frames[: files.index(inside.__file__) if inside.__file__ in files else None]
        return [FrameSummary(*frame, lookup_line=False) for frame in reversed(called)]

    def abort(self) -> None:
        """End the contexts of replicas that are threads, so that none waits for another one."""
        if isinstance(self._workers, _Threads):
            self._workers.abort()

    def close(self) -> None:
        """End idle replicas in good order: after their threads and exit handlers."""
        for worker in self._workers.workers:
            worker.task = channel.task(b"")  # an empty task ends the replica
        late, until = {*self._ids}, time.monotonic() + _LEAVE_S
        block_end = end_of_block() or math.inf
        while late and time.monotonic() < min(until, block_end):
            late -= {rank for rank, kind, _ in self.news(until) if kind == inside.LEFT}
        if late and until < block_end:  # one is stopped, or a thread holds its interpreter lock
            self._job.terminate()
        else:  # it raises if the block's deadline is over
            self._job.finish()

    def end(self) -> None:
        """End the replicas, busy or not."""
        self._job.terminate()

    def _worker(self, rank: int) -> Worker:
        return next(worker for worker in self._workers.workers if worker.rank == rank)


class _Threads(Workers):
    """Replicas that their model starts in this process, each with a channel."""

    def __init__(self, backend: str | None, size: int, options: dict[str, Any]) -> None:
        # Nothing is held, and the limit for stopped ranks doesn't apply: no signal stops a thread.
        super().__init__(size, ExitStack(), DEFAULT_TIMEOUT_S)
        self._models: dict[int, ComputationModel] = {}
        self._errors: list[BaseException] = []
        self._is_ending = False
        ends, statuses = [], []
        for rank in range(size):
            (ours, theirs), (status, their_status) = socket.socketpair(), socket.socketpair()
            self.workers.append(Worker(rank, ours, status))
            self.workers[-1].pid = os.getpid()
            ends.append(theirs)
            # `spawn` closes this socket once the replicas are over, which tells `status` of it.
            statuses.append(their_status)
        # Without `self`: this thread lives as long as the replicas, and would keep a pool that was
        # dropped.
        models, errors = self._models, self._errors

        def spawn() -> None:
            try:
                run_to_end(backend, inside.serve, (os.getpid(), ends, models), size, **options)
            except BaseException as error:  # `poll` raises it in the pool's call
                errors.append(error.with_traceback(None))  # frames would keep their variables
            finally:
                for sock in (*ends, *statuses):
                    sock.close()

        threading.Thread(target=spawn, name="unisono-pool-spawn", daemon=True).start()

    def abort(self) -> None:
        """End the contexts of all replicas."""
        for model in list(self._models.values()):
            model.abort()

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait for news of any replica; raise if they couldn't be started."""
        super().poll(job, until)
        if self._errors and not self._is_ending:
            self._is_ending = True
            raise self._errors[0]

    def end(self, job: Job[Any]) -> None:
        """End the replicas; a thread that computes ends once its call is over."""
        self._is_ending = True
        self.abort()
        for worker in self.running:
            with suppress(OSError):  # closing alone has no effect if a fork holds it open
                worker.channel.shutdown(socket.SHUT_RDWR)
            worker.channel.close()
            worker.is_silent = True  # so that `poll` leaves out the closed channel
        self.wait_for_ends(job, _QUIT_S)
        for worker in self.workers:
            worker.close()

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Return the error of replicas that ended by themselves."""
        del job, rank
        return LaunchError("the replicas of the pool have ended")


def _end(job: Job[Any], owner: int) -> None:
    """End replicas of a pool that was dropped, except in a fork."""
    if os.getpid() == owner:
        job.terminate()


def _may_wait(file: str) -> bool:
    """Return whether code of a file may wait for other ranks: torch's or our collectives."""
    return "/torch/distributed/" in file or (is_ours(file) and not _NEVER_WAITS.search(file))
