"""Replicas that torch_xla's own launcher makes, in a fresh process that this one starts.

The runtime reads its variables once, when it starts, and torch_xla sets some itself when it is
imported; so neither happens here. The fresh process forks the one, or on a TPU the several, in
which the replicas run, as threads where there are more of them than processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from unisono.deadlines import limit_of
from unisono.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    LaunchError,
    WorkerFailedError,
)
from unisono.launchers.job.failure import signal_name
from unisono.launchers.job.forkserver import interpreter
from unisono.launchers.job.job import Job, Ranks
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.tail import Tail
from unisono.launchers.variables import OF_XLA, without
from unisono.launchers.xla.child import FORK_DIED
from unisono.launchers.xla.crash_report import explain, with_ranks
from unisono.pickling import dumps
from unisono.topology import LaunchPlan, RankInfo

_BOOT = (
    "import sys, pickle; from multiprocessing.connection import Connection; "
    "link = Connection(int(sys.argv.pop(1))); sys.path[:] = pickle.loads(link.recv_bytes()); "
    "from unisono.launchers.xla.child import serve; serve(link)"
)
_SHOWN_CHARS = 8192
_POLL_S = 0.5
_TERM_S = 3.0  # after SIGTERM, before SIGKILL


def launch(
    entry: Callable[[RankInfo], Any], plan: LaunchPlan, *, environ: Mapping[str, str]
) -> list[Any]:
    """Run `entry` in the replicas that XLA's runtime makes."""
    if plan.start_method not in (None, "fork"):
        raise ArgumentError(
            f"start_method={plan.start_method!r}: XLA's replicas are forked from a fresh process, "
            "so leave it out"
        )
    task = dumps((pickle_for_worker(entry), plan, os.getpid()))
    link, theirs = multiprocessing.Pipe()
    with link:
        with theirs:
            process = _start(theirs.fileno(), environ)
        job: Job[Any] = Job(_Replicas(process, link), plan.nproc_per_node)
        try:
            with contextlib.suppress(OSError):  # it has died, which is seen when it is listened to
                link.send_bytes(pickle.dumps(search_path()))
                link.send_bytes(task)
            return job.join()
        finally:
            job.terminate()


class _Replicas(Ranks):
    """Replicas of one fresh process, which tells of all of them over one link."""

    def __init__(self, process: subprocess.Popen[bytes], link: Connection) -> None:
        self._process = process
        self._link = link
        self._tail = Tail(process.stderr)
        self._threads: dict[int, int] = {}

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait a little for news of any replica, and take it in."""
        # Also asked of the process: one that the user forked may hold the other end open.
        has_ended = self._process.poll() is not None
        left = max(0.0, min(_POLL_S, until - time.monotonic()))
        try:
            if self._link.poll(0.0 if has_ended else left):
                self._take(job, *pickle.loads(self._link.recv_bytes()))
                return
        except (EOFError, OSError):
            has_ended = True
        if has_ended and not job.failures:
            self._end_process()
            job.stop(self._died())

    def see_out(self, job: Job[Any]) -> None:
        """Wait for the process's end: what it still does may be a checkpoint."""
        try:
            self._process.wait(limit_of(None))
        except subprocess.TimeoutExpired as error:
            raise CollectiveTimeoutError(
                "the block's deadline is over: XLA's replicas have returned, but their process "
                "still had threads or exit handlers"
            ) from error
        if self._process.returncode != 0:
            job.stop(self._died())

    def end(self, job: Job[Any]) -> None:
        """End the fresh process and those that it forked."""
        del job
        self._end_process()
        self._tail.has_ended(1.0)

    def _take(self, job: Job[Any], kind: str, rank: int, body: Any) -> None:
        if kind == "thread":
            self._threads[body] = rank
        elif kind == "result":
            job.succeed(rank, body)
        elif rank < 0:
            job.stop(body.error(rank, job.world_size, "XLA's runtime"))
        else:
            job.fail(rank, body)

    def _died(self) -> WorkerFailedError:
        code, printed = self._process.returncode, self._tail.read()
        name = signal_name(-code) if code < 0 else None
        how = f" by {name}" if name else f" with exit code {code}" if code != FORK_DIED else ""
        last_words = with_ranks(printed, self._threads)[-_SHOWN_CHARS:]
        last_words = last_words or "(none; the kernel kills without a word where memory is short)"
        why = explain(printed, self._threads)
        return WorkerFailedError(
            f"the process of XLA's replicas ended{how} before they were done"
            f"{'. ' if why else ''}{why}; its last words:\n{last_words}",
            exit_code=code if code >= 0 and code != FORK_DIED else None,
            signal=name,
        )

    def _end_process(self) -> None:
        """End the fresh process and those that it forked, which it reaps itself if it can."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_S)
                return


def _start(link_fd: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [*interpreter(), "-c", _BOOT, str(link_fd)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**without(os.environ, OF_XLA), **env},
            pass_fds=[link_fd],
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"a process for XLA's replicas can't be started: {error}") from error
