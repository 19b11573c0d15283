"""Replicas that torch_xla's own launcher starts from a new process.

XLA's runtime reads its environment variables only once, when it starts, and importing torch_xla
sets some of them. So this process neither starts the runtime nor imports torch_xla. The new
process forks one process, or several on a TPU. These run the replicas, in threads if there are
more replicas than processes.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing.util
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from unisono.deadlines import limit_of
from unisono.errors import ArgumentError, CollectiveTimeoutError, LaunchError, WorkerFailedError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.failure import signal_name
from unisono.launchers.job.forkserver import die_with, seed_generators
from unisono.launchers.job.job import Job
from unisono.launchers.job.lifetime import (
    begin_rank,
    flush,
    join_threads,
    run_exit_handlers,
)
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.worker import describe, receive_task
from unisono.launchers.job.wrapper import Link, boot
from unisono.launchers.script.remote_workers import LauncherSpec, RemoteWorkers, run_function
from unisono.launchers.script.script import Script
from unisono.launchers.variables import OF_XLA, without
from unisono.pickling import Pickler
from unisono.topology import LaunchPlan, RankInfo

_SERVE = "from unisono.launchers.xla import serve; serve({})"
_FORK_DIED = 86  # exit code of the new process if a process that it forked has died
_LAST = -100  # priority of a finalizer that runs after all others


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    join: bool = True,
) -> Any:
    """Run `entry` in the replicas that XLA's runtime makes."""
    if plan.start_method not in (None, "fork"):
        raise ArgumentError(
            f"start_method={plan.start_method!r}: XLA's replicas are forked from a fresh process, "
            "so leave it out"
        )

    def prepare(*_: Any) -> tuple[Sequence[str], Mapping[str, str]]:
        command = boot(_SERVE.format(plan.nproc_per_node == 1))
        return command, {**without(os.environ, OF_XLA), **environ}

    # One replica runs alone, as rank 0 of 1: see `_own_rank_info`.
    size = 1 if plan.nproc_per_node == 1 else plan.nproc_per_node * plan.nnodes
    spec = LauncherSpec(
        "XLA's runtime",
        size,
        plan.nproc_per_node,
        end_signal=signal.SIGKILL,  # the process ignores SIGTERM, as its children must exit first
    )
    ranks = partial(_Replicas, plan)
    return run_function(entry, Script.of(plan), spec, prepare, environ, ranks, join=join)


class _Replicas(RemoteWorkers):
    """Replicas of one new process; each has its own connections to this process."""

    forwarded: Sequence[int] = ()
    n_last = 200  # enough for the stacks of all threads

    def __init__(self, plan: LaunchPlan, *args: Any) -> None:
        super().__init__(*args)
        self._plan = plan

    def wait_for_exits(self, job: Job[Any]) -> None:
        """Wait for the process to exit: a thread or exit handler may still write a checkpoint."""
        assert self.process is not None
        # The remaining time of the block's deadline; without one, there is no limit.
        if not self.has_ended(limit_of(None)):
            raise CollectiveTimeoutError(
                "the block's deadline is over: XLA's replicas have returned, but their process "
                "still had threads or exit handlers"
            )
        if self.process.returncode != 0:
            job.stop(self.early_end(job))

    def end(self, job: Job[Any]) -> None:
        """End the new process and its children, and close their connections."""
        # First, as signals on the status sockets are read by no one here.
        self.end_launcher()
        super().end(job)

    def cause_order(self, rank: int) -> int:
        return 1  # another replica of the same process may have ended it

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        self.end_launcher()  # its exit code and last lines are known only then
        return self.early_end(job)

    def early_end(self, job: Job[Any]) -> WorkerFailedError:
        """Return the error of the process, with its threads' stacks if it printed them."""
        assert self.process is not None
        # `serve` exits with _FORK_DIED itself, which isn't the exit code of the replica.
        code = self.process.returncode
        name = signal_name(-code) if code < 0 else None
        how = f" by {name}" if name else f" with exit code {code}" if code != _FORK_DIED else ""
        return WorkerFailedError(
            f"the process of XLA's replicas ended{how} before they returned; its last output:\n"
            f"{self.last_lines()}",
            exit_code=code if code >= 0 and code != _FORK_DIED else None,
            signal=name,
        )

    def problem_with(self, who: RankInfo | str | None) -> str:
        asked = self._plan.nproc_per_node
        if isinstance(who, RankInfo) and who.local_world_size != asked:
            n_local = who.local_world_size
            return (
                f"nproc_per_node={asked}, but XLA's runtime has {n_local} devices on this node: "
                f"ask for {n_local}, or for 1"
            )
        return super().problem_with(who)

    def with_node(self, who: RankInfo) -> RankInfo:
        return replace(who, node_rank=self._plan.node_rank, nnodes=self._plan.nnodes)


@dataclass(frozen=True, slots=True)
class _Child:
    """State of the new process, inherited by the processes that it forks."""

    link: Link
    is_alone: bool
    pid: int


_child: _Child | None = None  # a global, as torch_xla.launch would pickle an argument


def serve(is_alone: bool) -> NoReturn:
    """Run one job in this new process, and exit."""
    global _child
    _child = _Child(Link.taken(), is_alone, os.getpid())
    if not is_alone:  # this process stays until its children have exited, and reaps them
        signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=_after_fork)
    faulthandler.enable()  # XLA aborts the process if a replica doesn't run a graph
    try:
        # Not at the top of the module: the import sets and reads variables.
        torch_xla = importlib.import_module("torch_xla")
        torch_xla.launch(_replica, start_method="fork", debug_single_process=is_alone)
    except BrokenProcessPool:
        os._exit(_FORK_DIED)
    begin_rank()
    join_threads()
    run_exit_handlers()
    flush()
    os._exit(0)  # the steps of an exit are done above, in the order of `lifetime`


def _after_fork() -> None:
    """Set up a fork; if it is a replica's, it ends with its parent and seeds its generators."""
    assert _child is not None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # forks end at SIGTERM, unlike their parent
    # Forks of a replica, such as DataLoader workers, are not replicas.
    if os.getppid() == _child.pid:
        die_with(_child.pid)
        seed_generators()


def _replica(_rank: int) -> None:
    """Run the entry as one replica; each runs in its own thread if a process has several."""
    child = _child
    assert child is not None
    if os.getpid() != child.pid:  # multiprocessing skips exit handlers in its children
        multiprocessing.util.Finalize(None, run_exit_handlers, exitpriority=_LAST)
    who = _own_rank_info(child)
    channel, status = child.link.connect(b"c", who), child.link.connect(b"s", who)
    status.sendall(f"{os.getpid()}p".encode())
    task = receive_task(channel)
    if task is None:  # the job has ended already
        os._exit(1)
    messages.OWN.set(messages.OwnChannel(channel))
    try:
        entry = load_from_parent(task.entry)
        # Autograd's own threads would run hooks outside of the replica.
        with torch.autograd.set_multithreading_enabled(False):
            result = entry(task.info)
        buffer = io.BytesIO()
        _ResultPickler(buffer).dump(result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        flush()
        messages.send(channel, messages.ERROR, pickle.dumps(describe(error)))
        threading.Event().wait()  # the parent ends this process after it collects all errors
    flush()
    messages.send(channel, messages.RESULT, buffer.getvalue())


def _own_rank_info(child: _Child) -> RankInfo:
    """Return the calling replica's rank, as XLA's runtime numbers it."""
    if child.is_alone:
        return RankInfo(0, 1, 0, 1, 0, 1, source="spawn")
    runtime = importlib.import_module("torch_xla.runtime")
    return RankInfo(
        runtime.global_ordinal(),
        runtime.world_size(),
        runtime.local_ordinal(),
        runtime.local_device_count(),
        source="spawn",
    )


class _ResultPickler(Pickler):  # type: ignore[misc]
    """Pickles tensors of XLA devices as CPU tensors: the parent may have no such device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "xla":
            moved = obj.detach().cpu().requires_grad_(obj.requires_grad)
            return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)
