"""Replicas as local processes, made by a clean helper process that has torch imported already."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S, limit_of
from unisono.errors import ArgumentError, LaunchError, UnisonoError
from unisono.launchers.job import forkserver
from unisono.launchers.job.job import Job
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import Surroundings, directory, has_directory, search_path
from unisono.launchers.job.store import hold
from unisono.launchers.job.worker import Task, work
from unisono.launchers.job.worker_handles import Maker, Worker, Workers
from unisono.launchers.script.script import Script, env_for, without_job
from unisono.launchers.script.supervisor import Outcome, Supervisor, restart, start
from unisono.launchers.variables import share_of_cores
from unisono.topology import PREFIXED, PRIVATE_STORE, LaunchPlan, RankInfo
from unisono.tracebacks import hides

__tracebackhide__ = hides

# Else gloo listens at the address of the host's name; ours does so without, a plain script doesn't.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
_SEVERAL = "use launcher 'torchrun' for several nodes, or 'slurm', 'mpi' or 'ray'"


def run(script: Script, environ: Mapping[str, str] | None = None) -> Outcome:
    """Run a script in processes of this host, again after a failure where that was asked for."""
    # The store listens on the loopback at a port of the kernel's choice, and is a new one
    # after each failure.
    script.require_one_node("processes", _SEVERAL)
    base = {**_LOOPBACK, **without_job(os.environ if environ is None else environ)}
    for attempt in range(script.max_restarts + 1):
        outcome = _attempt(script, base, attempt)
        if outcome.code == 0 or outcome.interrupted is not None:
            return outcome
        if attempt < script.max_restarts:
            restart(outcome, attempt + 1, script.max_restarts)
    return outcome


def _attempt(script: Script, base: Mapping[str, str], attempt: int) -> Outcome:
    """Run the script once, with a store of its own that outlives every rank."""
    with ExitStack() as held, _terminal(script.stdin_rank) as lent:
        plan = hold(script.plan(), held)
        ranks = [plan.info(local_rank) for local_rank in range(script.nproc_per_node)]
        front = Supervisor(script, ranks)
        try:
            for info in ranks:
                own = env_for(info, attempt, script.max_restarts)
                if script.stdin_rank not in (None, info.rank):
                    own["PYTHONBREAKPOINT"] = "0"  # nobody could answer there
                terminal = lent if script.stdin_rank == info.rank else ()
                arguments = script.rank_argv(os.getpid(), terminal)
                front.processes.append(start(arguments, {**base, **own}, terminal))
        except LaunchError:
            front.kill()
            raise
        return front.run()


@contextlib.contextmanager
def _terminal(rank: int | None) -> Iterator[tuple[int, ...]]:
    """Lend one rank this process's stdout and stderr; its terminal is then set as it was."""
    if rank is None:
        yield ()
        return
    lent = os.dup(1), os.dup(2)
    before = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield lent
    finally:
        for fd in lent:
            os.close(fd)
        if before is not None:
            with contextlib.suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(0, termios.TCSADRAIN, before)


START_METHODS = ("forkserver", "spawn", "fork")
_END_S = 2.0
_LOOK_S = 0.005
_REQUEST_S = 300.0  # until the helper takes a request, which includes importing torch
# Variables that take effect when a library is loaded: a helper that has loaded them is too old.
_AT_LOAD = ("LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH_", "PYTORCH_")


@dataclass(frozen=True, slots=True)
class _Helper:
    """A helper process of this process, and what it was started with."""

    control: socket.socket
    process: subprocess.Popen[bytes]
    owner: int
    key: tuple[object, ...]


_helpers: dict[str, _Helper] = {}
_retired: list[_Helper] = []  # each ends with the last of its workers
_lock = threading.Lock()


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    join: bool = True,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Run `entry` in as many processes as planned."""
    method = plan.start_method or _best_method()
    if method not in START_METHODS or (method != "spawn" and sys.platform == "win32"):
        raise ArgumentError(f"start_method={method!r}: use one of {', '.join(START_METHODS)}")
    pickled = pickle_for_worker(entry)
    variables = {**(environ or {}), **os.environ}
    surroundings = Surroundings.here()

    def task_of(info: RankInfo) -> Task:
        return task(pickled, info, variables, search_path(), directory(), surroundings)

    held = ExitStack()
    workers = Workers(plan.world_size, held, stop_limit_s)
    own = [plan.info(local_rank).rank for local_rank in range(plan.nproc_per_node)]
    job: Job[Any] = Job(workers, plan.world_size, own, grace_s=plan.grace_s or None)
    try:
        plan = hold(plan, held)
        infos = [plan.info(local_rank) for local_rank in range(plan.nproc_per_node)]
        begin(workers, infos, task_of, held, method)
        if join:
            return job.join()
        job.send_tasks()
    except UnisonoError:
        job.terminate()
        raise
    except OSError as error:
        job.terminate()
        raise LaunchError(f"a worker process can't be started: {error}") from error
    except BaseException:  # Ctrl-C above all: nobody is left behind
        job.terminate()
        raise
    return job


def begin(
    workers: Workers,
    infos: Sequence[RankInfo],
    task_of: Callable[[RankInfo], Task],
    held: ExitStack,
    method: str | None = None,
) -> None:
    """Ask for processes of this host that are ranks of a job."""
    # They have their tasks once the job is joined.
    workers.maker = _start(infos, method or _best_method(), workers.workers, held)
    for worker, info in zip(workers.workers, infos, strict=True):
        worker.task = task_of(info).message()


def _best_method() -> str:
    return "forkserver" if sys.platform == "linux" else "spawn"


def task(
    pickled: bytes,
    info: RankInfo,
    environ: Mapping[str, str],
    path: list[str],
    folder: str,
    surroundings: Surroundings | None,
) -> Task:
    """Write what a worker process is told, without what a job around this process has told it."""
    own = {key: environ[key] for key in environ.keys() - {PRIVATE_STORE, PREFIXED}}
    variables = {**share_of_cores(info), **own}
    if info.private_store is not None:
        variables[PRIVATE_STORE] = info.private_store
    return Task.of(pickled, info, variables, path, folder, surroundings)


def _helper_for(method: str) -> _Helper:
    _retired[:] = [old for old in _retired if old.process.poll() is None]
    at_load = sorted(item for item in os.environ.items() if item[0].startswith(_AT_LOAD))
    # What a user may do is the helper's for good, and that of its workers.
    key = (*forkserver.interpreter(), os.geteuid(), os.getegid(), *os.getgroups(), *at_load)
    known = _helpers.get(method)
    if known is not None and known.owner == os.getpid():
        if known.key == key and _answers(known):
            return known
        _retire(known)
    _helpers[method] = known = _start_helper(method, key)
    return known


def _answers(helper: _Helper) -> bool:
    """Return whether a helper still has its end of the control socket open."""
    try:
        return helper.control.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _start_helper(method: str, key: tuple[object, ...]) -> _Helper:
    ours, theirs = socket.socketpair()
    path = search_path()
    code = (
        f"import sys; sys.path[:] = {path!r}\n"
        "import importlib.util as u\n"
        f"s = u.spec_from_file_location('unisono_helper', {str(Path(forkserver.__file__))!r})\n"
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
        f"m.main({theirs.fileno()}, {os.getpid()}, {method == 'forkserver'})"
    )
    with theirs:
        process = subprocess.Popen(
            [*forkserver.interpreter(), "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=None if has_directory() else "/",  # torch can't be imported where there is none
        )
    return _Helper(ours, process, os.getpid(), key)


def _retire(helper: _Helper) -> None:
    """Let a helper process end once it has no worker any more."""
    with contextlib.suppress(OSError), helper.control:  # forks of this process have copies of it
        helper.control.shutdown(socket.SHUT_RDWR)
    if helper.process.poll() is None:
        _retired.append(helper)


@atexit.register
def _dismiss_all() -> None:
    """End all helpers, and with them the workers that they still have."""
    for helper in (*_helpers.values(), *_retired):
        if helper.owner == os.getpid():
            for number in (signal.SIGTERM, signal.SIGKILL):
                helper.process.send_signal(number)
                helper.process.send_signal(signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    helper.process.wait(_END_S)
                    break
            helper.control.close()


class _Fork:
    """A fork of this process itself, which makes the workers of one job and ends with them."""

    def __init__(self, held: ExitStack) -> None:
        self.control, theirs = socket.socketpair()
        self._has_ended = False
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # A group of torch that is garbage here would join threads that it lacks.
                forkserver.make_ready_for_copies()
                self.control.close()
                forkserver.serve(theirs, parent, work)
            finally:
                os._exit(0)
        theirs.close()
        held.callback(self._end)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and reap it."""
        limit = time.monotonic() + (timeout or 0.0)
        while not self._is_reaped():
            if time.monotonic() >= limit:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(_LOOK_S)
        return 0

    def _is_reaped(self) -> bool:
        if not self._has_ended:
            pid, _ = os.waitpid(self.pid, os.WNOHANG)
            self._has_ended = pid != 0
        return self._has_ended

    def send_signal(self, sig: int) -> None:
        """Signal it unless it has ended."""
        if not self._is_reaped():
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        """Let it end, which it does without workers; one that doesn't is killed."""
        self.control.close()
        for number in (signal.SIGCONT, signal.SIGKILL):
            self.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(_END_S)
                return


def _start(infos: Sequence[RankInfo], method: str, workers: list[Worker], held: ExitStack) -> Maker:
    """Ask a helper for a worker each, which `workers` has from then on."""
    if method == "fork":  # outside of the lock, which the fork would have forever
        maker = _Fork(held)
        for info in infos:
            _ask_for_one(maker.control, method, info, workers)
        return maker
    with _lock:  # nobody retires the helper before it has all requests
        helper = _helper_for(method)
        helper.process.send_signal(signal.SIGCONT)
        for info in infos:
            _ask_for_one(helper.control, method, info, workers)
        return helper.process


def _ask_for_one(
    control: socket.socket, method: str, info: RankInfo, workers: list[Worker]
) -> None:
    _wait_for_room(control)
    channel, their_channel = socket.socketpair()
    status, their_status = socket.socketpair()
    with their_channel, their_status:
        workers.append(Worker(info.rank, channel, status))  # before it is made: Ctrl-C ends it, too
        request = b"exec" if method == "spawn" else b"fork"
        fds = [0, 1, 2, their_channel.fileno(), their_status.fileno()]
        socket.send_fds(control, [request], fds)


def _wait_for_room(control: socket.socket) -> None:
    """Wait until a helper takes one more request: it may import torch still, or be stuck."""
    writable = select.poll()
    writable.register(control, select.POLLOUT)
    limit_s = limit_of(_REQUEST_S) or 0.0
    if not writable.poll(limit_s * 1000):
        raise LaunchError(f"the process that makes ranks has taken no request for {limit_s:g} s")
