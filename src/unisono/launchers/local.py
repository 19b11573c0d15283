"""Replicas as local processes, forked by a server that has imported torch already."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import ArgumentError, LaunchError, UnisonoError
from unisono.launchers.job import forkserver
from unisono.launchers.job.channel import peek
from unisono.launchers.job.job import Job
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import check_streams, inherited, search_path, umask
from unisono.launchers.job.store import hold
from unisono.launchers.job.worker import task_message, work
from unisono.launchers.job.worker_handles import Worker, Workers
from unisono.launchers.job.wrapper import boot
from unisono.launchers.variables import share_of_cores
from unisono.plugins import read_environment
from unisono.topology import PREFIXED, PRIVATE_STORE, LaunchPlan, RankInfo

START_METHODS = ("forkserver", "spawn", "fork")
_DEFAULT_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
_END_S = 2.0  # for a fork server to end after each signal
_REQUEST_S = 300.0  # until the fork server accepts a request, which includes importing torch


@dataclass(frozen=True, slots=True)
class _ForkServer:
    """A fork server of this process, and the state that its workers inherit."""

    control: socket.socket
    process: subprocess.Popen[bytes]
    key: tuple[object, ...] = ()


_fork_servers: list[_ForkServer] = []  # all but the last one end with their last workers
_lock = threading.Lock()


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    join: bool = True,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Run `entry` in the planned number of processes."""
    method = plan.start_method or _DEFAULT_METHOD
    if method not in START_METHODS:
        raise ArgumentError(f"start_method={method!r}: use one of {', '.join(START_METHODS)}")
    check_streams()
    pickled = pickle_for_worker(entry)
    variables = {**(environ or {}), **os.environ}  # what the user has set has priority
    path = search_path()

    def task_of(info: RankInfo) -> memoryview:
        of_rank = variables_of(info, variables)
        return task_message(pickled, info, of_rank, path, os.getcwd(), umask())

    held = ExitStack()
    workers = Workers(plan.world_size, held, stop_limit_s)
    expected = [plan.info(local_rank).rank for local_rank in range(plan.nproc_per_node)]
    # Created before anything is held or started, because `terminate` closes all of that.
    job: Job[Any] = Job(workers, plan.world_size, expected, grace_s=plan.grace_s or None)
    try:
        plan = hold(plan, held)
        infos = [plan.info(local_rank) for local_rank in range(plan.nproc_per_node)]
        begin(workers, infos, task_of, held, method)
        if join:
            return job.join()
        job.send_tasks()  # otherwise the ranks would begin only at a later `join`
    except BaseException as error:  # Ctrl-C above all: no process is left running
        job.terminate()
        # CollectiveTimeoutError is an OSError.
        if isinstance(error, OSError) and not isinstance(error, UnisonoError):
            raise LaunchError(f"a worker process can't be started: {error}") from error
        raise
    return job


def start_early() -> None:
    """Start the fork server that a program is about to need, unless the program is a rank."""
    if _DEFAULT_METHOD != "forkserver" or multiprocessing.parent_process() is not None:
        return
    # `launch` will raise what is wrong; an embedded interpreter may have no `sys.executable`.
    with contextlib.suppress(OSError, TypeError, UnisonoError):
        if read_environment(os.environ) is None:
            with _lock:
                _fork_server_for(_DEFAULT_METHOD)


def begin(
    workers: Workers,
    infos: Sequence[RankInfo],
    task_of: Callable[[RankInfo], memoryview],
    held: ExitStack,
    method: str = _DEFAULT_METHOD,
) -> None:
    """Request processes of this host as ranks of a job; their tasks are sent once it is joined."""
    if method == "fork":  # outside the lock, which the fork would inherit locked
        ours, theirs = socket.socketpair()
        parent = os.getpid()

        def serve() -> None:
            # Collecting torch's groups here would join threads that exist only in the parent.
            forkserver.prepare_for_forks()
            ours.close()  # this copy would hide the end of the control socket
            forkserver.run(theirs, parent, work)

        with theirs:
            server = _ForkServer(ours, forkserver.Fork(serve))
        held.callback(_end, server)
        _request(server, infos, workers)
    else:
        with _lock:  # otherwise a server may be retired before it has all requests
            _request(_fork_server_for(method), infos, workers)
    for worker, info in zip(workers.workers, infos, strict=True):
        worker.task = task_of(info)


def variables_of(info: RankInfo, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's variables, without those of an enclosing job."""
    kept = {key: environ[key] for key in environ.keys() - {PRIVATE_STORE, PREFIXED}}
    if info.private_store is not None:
        kept[PRIVATE_STORE] = info.private_store
    return {**share_of_cores(info), **kept}  # a number of threads that the user sets has priority


def _fork_server_for(method: str) -> _ForkServer:
    """Return a fork server whose workers inherit this process's present state."""
    of_start = {item for item in os.environ.items() if item[0].startswith(("LD_", "PYTHON"))}
    of_load = forkserver.at_load(os.environ)  # too late to change once the server has loaded torch
    key = (method, *forkserver.interpreter(), *inherited(), *sorted(of_start | of_load))
    for known in tuple(_fork_servers):
        # In a fork of this process, whose children they aren't, `poll` counts them as ended.
        has_ended = known.process.poll() is not None
        # A different key means that its state is outdated; an empty peek means that it is ending.
        if not has_ended and known.key == key and peek(known.control) != b"":
            return known
        with contextlib.suppress(OSError), known.control:
            if has_ended:
                _fork_servers.remove(known)
            else:  # closing isn't enough: forks have copies
                known.control.shutdown(socket.SHUT_RDWR)
    ours, theirs = socket.socketpair()
    # For method "forkserver" it imports torch, once for all workers.
    arguments = f"{theirs.fileno()}, {os.getpid()}, {method == 'forkserver'}"
    command = boot(f"from unisono.launchers.job.forkserver import main; main({arguments})")
    with theirs:
        fds = [theirs.fileno()]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
    _fork_servers.append(_ForkServer(ours, process, key))
    return _fork_servers[-1]


@atexit.register
def _end_all() -> None:
    """End all fork servers of this process, and thereby their workers."""
    for server in _fork_servers:  # in a fork, the signals to its parent's servers have no effect
        _end(server)


def _end(server: _ForkServer) -> None:
    """End a fork server with its workers; it is killed if it doesn't end by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        server.process.send_signal(number)
        server.process.send_signal(signal.SIGCONT)  # a stopped server gets SIGTERM only then
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(_END_S)
            break
    server.control.close()


def _request(server: _ForkServer, infos: Sequence[RankInfo], workers: Workers) -> None:
    """Request a worker for each rank from a fork server, and add it to `workers`."""
    server.process.send_signal(signal.SIGCONT)  # a stopped server wouldn't answer
    for info in infos:
        channel, their_channel = socket.socketpair()
        status, their_status = socket.socketpair()
        with their_channel, their_status:
            # Before the request, so that Ctrl-C ends this worker, too.
            workers.workers.append(Worker(info.rank, channel, status))
            fds = [0, 1, 2, their_channel.fileno(), their_status.fileno()]
            server.control.settimeout(_REQUEST_S)
            try:
                socket.send_fds(server.control, [b"."], fds)
            finally:
                server.control.settimeout(None)
    workers.fork_server = server.process  # which `Workers` wakes if it is stopped
