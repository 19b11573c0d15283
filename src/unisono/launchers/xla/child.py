"""The fresh process in which torch_xla's launcher runs, and the replicas that it makes."""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import threading
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from unisono.errors import LaunchError
from unisono.launchers.job.forkserver import die_with
from unisono.launchers.job.lifetime import Lifetime, flush, seed_generators
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.worker import describe
from unisono.pickling import Pickler
from unisono.topology import LaunchPlan, RankInfo

FORK_DIED = 86
"""Exit code of the fresh process where one that it forked has died."""
_LAST = -100


@dataclass(frozen=True, slots=True)
class _Child:
    """What the fresh process knows, and those that it forks."""

    link: Connection
    lock: Any
    entry: bytes
    plan: LaunchPlan
    pid: int

    def send(self, kind: str, rank: int, body: Any) -> None:
        """Send one message; replicas of several processes share the link."""
        with self.lock:
            self.link.send_bytes(pickle.dumps((kind, rank, body)))


# The runtime's launcher pickles the function that it runs, and a link and a lock can't be.
_child: _Child | None = None


def serve(link: Connection) -> NoReturn:
    """Run one job in this fresh process, and end it."""
    global _child
    entry, plan, parent = pickle.loads(link.recv_bytes())
    die_with(parent)
    lock = multiprocessing.get_context("fork").Lock()
    _child = child = _Child(link, lock, entry, plan, os.getpid())
    os.set_inheritable(link.fileno(), False)
    is_alone = plan.nproc_per_node == 1
    if not is_alone:  # those that it forks end first, and are buried here
        signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=_after_fork)
    faulthandler.enable()  # XLA aborts the process where a graph doesn't get all replicas
    try:
        torch_xla = importlib.import_module("torch_xla")
        torch_xla.launch(_replica, start_method="fork", debug_single_process=is_alone)
    except BrokenProcessPool:
        os._exit(FORK_DIED)
    except BaseException as error:
        child.send("failure", -1, describe(error))
        os._exit(1)
    Lifetime.begin()
    Lifetime.join_threads()
    Lifetime.run_exit_handlers()
    flush()
    os._exit(0)


def _after_fork() -> None:
    assert _child is not None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.getppid() == _child.pid:
        die_with(_child.pid)
        seed_generators()


def _replica(_rank: int) -> None:
    """Run the entry as one replica: in a thread of its own where a process has several."""
    child = _child
    assert child is not None
    runtime = importlib.import_module("torch_xla.runtime")
    rank = runtime.global_ordinal()
    if os.getpid() != child.pid:  # multiprocessing ends those that it forks without exit handlers
        multiprocessing.util.Finalize(None, Lifetime.run_exit_handlers, exitpriority=_LAST)
    child.send("thread", rank, threading.get_ident())
    try:
        entry = load_from_parent(child.entry)
        # Autograd's own threads would run hooks outside of the replica.
        with torch.autograd.set_multithreading_enabled(False):
            result = entry(_info(runtime, child.plan))
        buffer = io.BytesIO()
        _ResultPickler(buffer).dump(result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
        flush()
        child.send("failure", rank, describe(error))
        threading.Event().wait()  # others may know more: the parent ends all once it has heard them
    flush()
    child.send("result", rank, buffer.getvalue())


def _info(runtime: Any, plan: LaunchPlan) -> RankInfo:
    if plan.nproc_per_node == 1:
        return RankInfo(0, 1, 0, 1, 0, 1, source="spawn")
    n_local = runtime.local_device_count()
    if n_local != plan.nproc_per_node:
        raise LaunchError(
            f"nproc_per_node={plan.nproc_per_node}, but XLA's runtime has {n_local} devices on "
            f"this node: ask for {n_local}, or for 1"
        )
    return RankInfo(
        runtime.global_ordinal(),
        runtime.world_size(),
        runtime.local_ordinal(),
        n_local,
        plan.node_rank,
        plan.nnodes,
        source="spawn",
    )


class _ResultPickler(Pickler):  # type: ignore[misc]
    """Pickles tensors of XLA devices as CPU tensors: the parent may have no such device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "xla":
            moved = obj.detach().cpu().requires_grad_(obj.requires_grad)
            return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)
