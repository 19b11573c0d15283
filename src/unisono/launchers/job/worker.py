"""A worker process: reads its task, runs it, sends the parent its result or failure."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from unisono.at_exit import LastCalls
from unisono.errors import CollectiveError, PayloadError, PeerFailedError, WorkerFailedError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.failure import Failure, chain
from unisono.launchers.job.forkserver import die_with, seed_generators
from unisono.launchers.job.lifetime import (
    PEERS_S,
    begin_rank,
    flush,
    run_exit_handlers,
    traceback_of,
)
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.process_state import name_process
from unisono.launchers.variables import rank_variables
from unisono.pickling import dumps
from unisono.topology import RankInfo
from unisono.tracebacks import summary


@dataclass(frozen=True, slots=True)
class Task:
    """A worker's task."""

    entry: bytes
    info: RankInfo
    environ: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    umask: int | None


def task_message(
    entry: bytes,
    info: RankInfo,
    environ: Mapping[str, str],
    path: list[str],
    directory: str,
    umask: int | None = None,
) -> memoryview:
    """Build the message that sends a worker its task."""
    variables = {**environ, **rank_variables(info)}
    task = Task(entry, info, variables, path, list(sys.argv), directory, umask)
    return messages.task(pickle.dumps(task))


def receive_task(channel: socket.socket) -> Task | None:
    """Wait for this worker's task; None if the job has ended before sending one."""
    message = messages.receive(channel)
    if message is None or message[0] != messages.TASK:
        return None
    task: Task = pickle.loads(message[1])
    return task


def work(channel_fd: int, parent: int) -> NoReturn:
    """Run one task and end the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    die_with(parent)
    channel = socket.socket(fileno=channel_fd)
    task = receive_task(channel)
    if task is None:  # the job has ended, and nobody reads a report
        os._exit(1)
    # From here on `_watch` ends this process with its parent, even if the function blocks.
    ended, all_done = threading.Event(), threading.Event()
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    watched = (channel, tasks, ended, all_done)
    threading.Thread(target=_watch, args=watched, name="unisono-parent", daemon=True).start()
    messages.OWN.set(messages.OwnChannel(channel, tasks))
    begin_rank()
    try:
        _set_up(task)
        name_process(task.info.rank, task.info.world_size, (task.argv or [""])[0])
        value = load_from_parent(task.entry)(task.info)
        body = _pickle(value)
        run_exit_handlers()
        flush()
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        failure = describe(error)
        flush()
        with contextlib.suppress(OSError):
            messages.send(channel, messages.ERROR, pickle.dumps(failure))
        # Connections stay open until the parent has this error, as their end makes peers fail.
        ended.wait()
        os._exit(1)
    messages.send(channel, messages.RESULT, body)
    # After the result: some of these calls end the other ranks.
    LastCalls.make(partial(_wait_for_peers, channel, all_done, ended))
    os._exit(0)


def _wait_for_peers(
    channel: socket.socket, all_done: threading.Event, ended: threading.Event, why: str
) -> None:
    """Wait for the other ranks, which this exit would end; send the parent an error if in vain."""
    if not all_done.wait(PEERS_S):
        error = CollectiveError(f"{why}, and other ranks may wait for it: the job ends")
        messages.send(channel, messages.ERROR, pickle.dumps(describe(error)))
        ended.wait(PEERS_S)  # until the parent has read it, and ends this rank


def _pickle(result: object) -> bytes:
    try:
        return dumps(result)
    except Exception as error:  # an object's own __reduce__ may raise anything
        raise PayloadError(
            f"the result, a {type(result).__qualname__}, can't be pickled: "
            f"{type(error).__name__}: {error}"
        ) from error


def _set_up(task: Task) -> None:
    """Set up the parent's state in this process, apart from what is inherited."""
    os.environ.clear()  # the fork server's variables may be outdated
    os.environ.update(task.environ)
    sys.path[:] = task.path
    seed_generators()
    importlib.invalidate_caches()  # files may be newer than the fork server
    sys.argv[:] = task.argv
    try:
        os.chdir(task.directory)
    except OSError:
        if task.umask is not None:  # without a umask, the parent may be on another host
            raise
    if task.umask is not None:
        os.umask(task.umask)
    # torch reads the variable only when it is loaded, which a fork server has done already.
    threads = task.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > 0 and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads))


def _watch(
    channel: socket.socket,
    tasks: queue.SimpleQueue[bytes],
    ended: threading.Event,
    all_done: threading.Event,
) -> None:
    """Read further messages of the parent, and end this process once they end."""
    while (message := messages.receive(channel)) is not None and message[0] != messages.END:
        if message[0] == messages.DONE:
            all_done.set()
        else:
            tasks.put(message[1])
    if message is None:  # the parent has ended, perhaps by a crash
        os.kill(os.getpid(), signal.SIGKILL)
    flush()  # SIGTERM would discard the buffers
    ended.set()  # a failed rank waits only for this
    os.kill(os.getpid(), signal.SIGTERM)


def describe(error: BaseException) -> Failure:
    """Return the failure to report for a function's exception."""
    try:
        cause = dumps(error)
    except Exception:  # the traceback suffices
        cause = None
    return Failure(
        summary=summary(error),
        traceback=traceback_of(error),
        exit_code=WorkerFailedError.exit_code_of(error),
        # About another rank's failure.
        is_secondary=any(isinstance(each, PeerFailedError) for each in chain(error)),
        cause=cause,
        line=WorkerFailedError.line_of(error),
    )
