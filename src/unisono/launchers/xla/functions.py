"""Replicas that torch_xla's own launcher makes, in a fresh process that this one starts.

The runtime reads its variables once, when it starts, and torch_xla sets some itself when it is
imported; so neither happens here. The fresh process forks the one, or on a TPU the several, in
which the replicas run, as threads where there are more of them than processes.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from unisono.deadlines import limit_of, require_time
from unisono.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    LaunchError,
    WorkerFailedError,
)
from unisono.launchers.job.job import raised
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.xla.child import FORK_DIED
from unisono.launchers.xla.crash_report import explain, with_ranks
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("launch",)

_BOOT = (
    "import sys, pickle; from multiprocessing.connection import Connection; "
    "link = Connection(int(sys.argv.pop(1))); sys.path[:] = pickle.loads(link.recv_bytes()); "
    "from unisono.launchers.xla.child import serve; serve(link)"
)
# Variables of the job that this process may itself belong to.
_FOREIGN = ("TORCHELASTIC_RUN_ID", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT")
_KEPT_BYTES, _SHOWN_CHARS = 65536, 8192
_POLL_S = 0.5
_TERM_S = 3.0  # after SIGTERM, before SIGKILL


def launch(
    entry: Callable[[RankInfo], Any], plan: LaunchPlan, *, env: Mapping[str, str]
) -> list[Any]:
    """Run `entry` in the replicas that XLA's runtime makes.

    Local.

    Args:
        entry: called once in each replica with who it is.
        plan: how many replicas to start on this node; the runtime may start another number.
        env: variables that the runtime needs, besides this process's own.

    Returns:
        What `entry` returned, by rank of this node; tensors of XLA devices come on the CPU.

    Raises:
        ArgumentError: another start method than fork was asked for.
        PayloadError: `entry` can't be pickled.
        WorkerFailedError: a replica failed, or their process did.
        CollectiveTimeoutError: the block's deadline is over; all replicas have been ended.
    """
    if plan.start_method not in (None, "fork"):
        raise ArgumentError(
            f"start_method={plan.start_method!r}: XLA's replicas are forked from a fresh process, "
            "so leave it out"
        )
    job = cloudpickle.dumps((pickle_for_worker(entry), plan, os.getpid()))
    link, theirs = multiprocessing.Pipe()
    with link:
        with theirs:
            process = _start(theirs.fileno(), env)
        tail = _Tail(process)
        threads: dict[int, int] = {}
        try:
            path = search_path()
            with contextlib.suppress(OSError):  # it has died: _collect says how
                link.send_bytes(pickle.dumps(path))
                link.send_bytes(job)
            results = _collect(link, process, plan.nproc_per_node, threads)
            if results is not None:  # what they still do at their end may be a checkpoint
                _wait(process)
        finally:
            _end(process)
            printed = tail.read()
    if results is None or process.returncode != 0:
        raise _died(process.returncode, printed, threads)
    return [pickle.loads(results[rank]) for rank in sorted(results)]


def _start(link_fd: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    variables = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(link_fd)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**variables, **env},
            pass_fds=[link_fd],
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"a process for XLA's replicas can't be started: {error}") from error


class _Tail:
    """Passes on what the replicas print to stderr, and keeps the end of it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._kept = b""
        self._thread = threading.Thread(target=self._pass_on, name="unisono-xla", daemon=True)
        self._thread.start()

    def read(self) -> str:
        """Give the end of what was printed; processes that the user left behind aren't awaited."""
        self._thread.join(1.0)
        return self._kept.decode(errors="replace")

    def _pass_on(self) -> None:
        stream = self._process.stderr
        assert isinstance(stream, io.BufferedReader)
        with stream:
            while chunk := stream.read1(65536):
                self._kept = (self._kept + chunk)[-_KEPT_BYTES:]
                with contextlib.suppress(Exception):  # sys.stderr may be closed, or a user's own
                    sys.stderr.write(chunk.decode(errors="replace"))
                    sys.stderr.flush()


def _collect(
    link: Connection,
    process: subprocess.Popen[bytes],
    n_replicas: int,
    threads: dict[int, int],
) -> dict[int, bytes] | None:
    """Take in the results and which thread each rank is; None where not all results came."""
    results: dict[int, bytes] = {}
    while len(results) < n_replicas:
        require_time([rank for rank in range(n_replicas) if rank not in results], n_replicas)
        # Also asked of the process: one that the user forked may hold the other end open.
        has_ended = process.poll() is not None
        try:
            if not link.poll(0.0 if has_ended else _POLL_S):
                if has_ended:
                    return None
                continue
            kind, rank, body = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            return None
        if kind == "failure":
            raise raised(rank, n_replicas, body, "XLA's runtime" if rank < 0 else "")
        if kind == "thread":
            threads[body] = rank
        else:
            results[rank] = body
    return results


def _died(code: int, printed: str, threads: Mapping[int, int]) -> WorkerFailedError:
    name = signal.Signals(-code).name if code < 0 else None
    how = f" by {name}" if name else f" with exit code {code}" if code != FORK_DIED else ""
    words = with_ranks(printed, threads)[-_SHOWN_CHARS:]
    words = words or "(none; the kernel kills without a word where memory is short)"
    why = explain(printed, threads)
    return WorkerFailedError(
        f"the process of XLA's replicas ended{how} before they were done"
        f"{'. ' if why else ''}{why}; its last words:\n{words}",
        exit_code=code if code >= 0 and code != FORK_DIED else None,
        signal=name,
    )


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait until the fresh process has ended, after its threads and exit handlers. Local."""
    try:
        process.wait(limit_of(None))
    except subprocess.TimeoutExpired as error:
        raise CollectiveTimeoutError(
            "the block's deadline is over: XLA's replicas have returned, but their process still "
            "had threads or exit handlers"
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the fresh process and those that it forked, which it buries itself if it can."""
    for number, wait_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _TERM_S)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return
