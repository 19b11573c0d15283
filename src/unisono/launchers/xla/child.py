"""The fresh process in which torch_xla's launcher runs, and the replicas that it makes."""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing.util
import os
import pickle
import signal
import threading
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from unisono.launchers.job import channel as messages
from unisono.launchers.job.forkserver import die_with
from unisono.launchers.job.lifetime import Lifetime, flush, seed_generators
from unisono.launchers.job.pickling import load_from_parent
from unisono.launchers.job.worker import Task, describe
from unisono.launchers.job.wrapper import Link
from unisono.pickling import Pickler
from unisono.topology import RankInfo

FORK_DIED = 86
"""Exit code of the fresh process where one that it forked has died."""
_LAST = -100


@dataclass(frozen=True, slots=True)
class _Child:
    """What the fresh process knows, and those that it forks."""

    link: Link
    is_alone: bool
    pid: int


_child: _Child | None = None  # the runtime's launcher pickles the function that it runs


def serve(is_alone: bool) -> NoReturn:
    """Run one job in this fresh process, and end it."""
    global _child
    _child = _Child(Link.taken(), is_alone, os.getpid())
    if not is_alone:  # those that it forks end first, and are buried here
        signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=_after_fork)
    faulthandler.enable()  # XLA aborts the process where a graph doesn't get all replicas
    try:
        torch_xla = importlib.import_module("torch_xla")
        torch_xla.launch(_replica, start_method="fork", debug_single_process=is_alone)
    except BrokenProcessPool:
        os._exit(FORK_DIED)
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
    if os.getpid() != child.pid:  # multiprocessing ends those that it forks without exit handlers
        multiprocessing.util.Finalize(None, Lifetime.run_exit_handlers, exitpriority=_LAST)
    who = _who_am_i(child)
    channel, status = child.link.connect(b"c", who), child.link.connect(b"s", who)
    status.sendall(f"{os.getpid()}p".encode())
    message = messages.receive(channel)
    if message is None:
        os._exit(1)
    task: Task = pickle.loads(message[1])
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
        threading.Event().wait()  # others may know more: the parent ends all once it has heard them
    flush()
    messages.send(channel, messages.RESULT, buffer.getvalue())


def _who_am_i(child: _Child) -> RankInfo:
    if child.is_alone:
        return RankInfo(0, 1, 0, 1, 0, 1, source="spawn")
    runtime = importlib.import_module("torch_xla.runtime")
    of_job = (runtime.global_ordinal(), runtime.world_size())
    of_node = (runtime.local_ordinal(), runtime.local_device_count())
    return RankInfo(*of_job, *of_node, source="spawn")


class _ResultPickler(Pickler):  # type: ignore[misc]
    """Pickles tensors of XLA devices as CPU tensors: the parent may have no such device."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "xla":
            moved = obj.detach().cpu().requires_grad_(obj.requires_grad)
            return moved.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)
