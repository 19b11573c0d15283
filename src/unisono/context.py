"""Which context is active: asked at every call, so that it is never stale."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from unisono import registry
from unisono.control.signatures import site
from unisono.errors import (
    AlreadyInitializedError,
    ArgumentError,
    ContextError,
    EnvironmentDetectionError,
    NoReplicaError,
)
from unisono.model.contract import ComputationModel
from unisono.models.serial import SerialModel
from unisono.plugins import plugin_environments
from unisono.topology import ContextHint, RankInfo

__all__ = (
    "activate",
    "communicator",
    "current_model",
    "detect_environment",
    "forget",
    "is_ours",
    "is_serial",
    "left_half_way",
    "own_model",
    "read_environment",
    "refuse_fork",
    "replica",
    "set_local_rank",
)

_NO_HINT = ContextHint()
_serial = SerialModel()


class _Slot(threading.local):
    model: ComputationModel | None = None
    ours: ComputationModel | None = None


_thread = _Slot()
_process: ComputationModel | None = None
_ours: ComputationModel | None = None
_before: ComputationModel | None = None
_forked: ComputationModel | None = None
_replica_threads = 0
_local_rank: int | None = None
_lock = threading.RLock()


def current_model() -> ComputationModel:
    """Give the model of the active context.

    Local. The thread's own context comes first, then the process's, then one that somebody else
    made and that is found by asking the models, then serial.

    Returns:
        The model; its context is live.

    Raises:
        NoReplicaError: this thread isn't a replica while replicas of this process are threads.
    """
    model = _thread.model
    if model is None:
        model = _process
    if model is not None and model.is_alive():
        return model
    return _look_around()


def communicator() -> ComputationModel:
    """Give the active model, ready for a collective.

    Local, but for waiting until what runs asynchronously in the background is done.

    Raises:
        CollectiveError: this rank left a collective half-way.
        ContextError: this process is a fork of the one that made the context.
        NoReplicaError: as in `current_model`.
    """
    model = own_model()
    if model._background is not None or model.is_lazy:
        model.settle()
    return model


def own_model() -> ComputationModel:
    """Give the active model, whose collectives this process may start.

    Local.

    Raises:
        ContextError: this process is a fork of the one that made the context.
        NoReplicaError: as in `current_model`.
    """
    model = _thread.model or _process  # as current_model, a call less
    if model is None or not model.is_alive():
        model = _look_around()
    if _forked is not None:
        refuse_fork(model)
    if model.interrupted is not None:
        model.check_whole()
    return model


def refuse_fork(model: ComputationModel) -> None:
    """Raise if this process is a fork of the one that made the context of `model`. Local.

    Raises:
        ContextError: it is.
    """
    if _forked is not None and model.context_id == _forked.context_id:
        raise ContextError(
            f"this process is a fork of rank {model.topology.rank}, whose connections it must not "
            "use: call this in the process that initialised, or start processes of their own"
        )


def left_half_way(call: str, error: BaseException) -> None:
    """Take note that something out of nowhere, such as Ctrl-C, ended a collective.

    Local.

    Args:
        call: its name.
        error: what was raised.
    """
    model = _thread.model or _process
    if model is not None and _forked is None and model.topology.world_size > 1:
        who = f"rank {model.topology.rank} of {model.topology.world_size}"
        line = site().decode("utf-8", "replace")
        model.interrupt(who, f"{type(error).__name__} interrupted {call} at {line}")


def _look_around() -> ComputationModel:
    with _lock:
        model = _still_alive() or _adopt()
    if model is not None:
        return model
    if _replica_threads:
        raise NoReplicaError(
            f"thread {threading.current_thread().name!r} isn't a replica, while the replicas of "
            "this process are threads: make the call in the function that was given to spawn"
        )
    return _serial


def _adopt() -> ComputationModel | None:
    """Find the context that somebody else made; every thread gets the same view of it."""
    global _process
    if registry.probe(_NO_HINT) is None:
        if _before is not None:
            _hand_over(None)
        return None
    model = registry.probe(_hint())
    if model is not None:
        model.must_introduce = model.topology.world_size > 1 and not model.hosts
    _hand_over(model)
    if model is None:
        return None
    if _forked is not None and type(model) is type(_forked) and _forked.is_alive():
        model.inherit(_forked)
    if model.is_thread_bound:
        _thread.model = model
    else:
        _process = model
    return model


def _still_alive() -> ComputationModel | None:
    """Give the thread's or the process's context if it lives; part with one that has ended."""
    global _process
    if _thread.model is not None and not _thread.model.is_alive():
        _thread.model = None
    if _process is not None and not _process.is_alive():
        _process.part()
        _process = None
    return _thread.model or _process


def _hand_over(model: ComputationModel | None) -> None:
    """Let a view of a context that was let go of leave what its ranks made to the new view."""
    global _before
    before, _before = _before, None
    if before is None:
        return
    if model is not None and type(before) is type(model) and before.is_alive():
        model.inherit(before)
    elif not before.is_alive():
        before.part()


def _hint() -> ContextHint:
    environment, local_rank = detect_environment(), _local_rank
    if local_rank is None and environment is None:
        text = os.environ.get("LOCAL_RANK", "")  # alone it says nothing of who else is there
        local_rank = int(text) if text.isdecimal() else None
    return ContextHint(local_rank, environment)


def read_environment() -> RankInfo | None:
    """Read who this process is from its variables; what reads them is loaded at the first call.

    Local.

    Returns:
        The facts; None where the variables say nothing.

    Raises:
        EnvironmentDetectionError: they are partial, malformed or contradict each other.
    """
    detect = importlib.import_module("unisono.environments.detection").detect
    found: RankInfo | None = detect(os.environ, plugin_environments())
    return found


def detect_environment() -> RankInfo | None:
    """Read the process's variables, where a partial set of them is as good as none. Local."""
    try:
        return read_environment()
    except EnvironmentDetectionError:
        return None


def activate(
    make: Callable[[], ComputationModel], cls: type[ComputationModel] | None = None
) -> ComputationModel:
    """Make a context and let it be the process's, or the thread's where the model is bound to it.

    Collective over the ranks of the new context.

    Args:
        make: initialises a model.
        cls: the model; given where it may join the replicas that its library made as threads.

    Returns:
        The model.

    Raises:
        AlreadyInitializedError: a context is live, no matter who made it.
        ContextError: this process is a fork of a replica of that model.
    """
    global _process, _ours
    with _lock:
        live: ComputationModel | None = current_model()
        if _forked is not None and live is not None and live.context_id == _forked.context_id:
            if type(live) is cls:  # its library holds what the parent made, and no more than one
                refuse_fork(live)
            live = None
        joins = live is not None and live.is_thread_bound and type(live) is cls
        if live is not None and live is not _serial and (is_ours(live) or not joins):
            raise AlreadyInitializedError(
                f"a {live.name} context is live already (rank {live.topology.rank} of "
                f"{live.topology.world_size}): call finalize() first"
            )
        model = make()
        if model.is_thread_bound:
            _thread.model = _thread.ours = model
        else:
            _process = _ours = model
        return model


def is_ours(model: ComputationModel) -> bool:
    """Tell whether `activate` made this context. Local."""
    return model is _ours or model is _thread.ours


def is_serial(model: ComputationModel) -> bool:
    """Tell whether `model` is what is active when no context is. Local."""
    return isinstance(model, SerialModel)


def forget() -> None:
    """Let go of the process's context, so that the next call looks around. Local."""
    global _process, _ours, _before
    with _lock:
        _before = _process or _before
        if _before is not None and not _before.is_alive():  # torch's group listens as long as it is
            _before.part()
            _before = None
        _process = _ours = None
        if _thread.model is not None and _thread.model.is_thread_bound:
            _thread.model = _thread.ours = None


def set_local_rank(local_rank: int | None) -> None:
    """Set or take back the hint for contexts that somebody else made. Local."""
    global _local_rank, _process, _before
    is_rank = isinstance(local_rank, int) and not isinstance(local_rank, bool) and local_rank >= 0
    if local_rank is not None and not is_rank:
        raise ArgumentError(f"local_rank should be an int of at least 0, or None: {local_rank!r}")
    with _lock:
        _local_rank = local_rank
        if _process is not None and _process is not _ours:
            _before, _process = _process, None


@contextmanager
def replica(model: ComputationModel) -> Iterator[None]:
    """Bind a model to this thread: the thread is that replica, or the whole process is. Local."""
    global _process, _replica_threads
    is_one_of_many = model.topology.world_size > 1
    is_process = is_one_of_many and threading.current_thread() is threading.main_thread()
    before, before_in_process = _thread.model, _process
    with _lock:
        _replica_threads += is_one_of_many and not is_process
        if is_process:  # then the threads that it starts belong to it too
            _process = model
    _thread.model = model
    try:
        yield
    finally:
        _thread.model = before
        with _lock:
            _replica_threads -= is_one_of_many and not is_process
            if is_process:
                _process = before_in_process


def _before_fork() -> None:
    """Look for a context that somebody made and nobody has asked for yet: the child must know."""
    if _process is None and _thread.model is None and _lock.acquire(blocking=False):
        try:
            with suppress(Exception):  # a fork isn't the place to report it
                _adopt()
        finally:
            _lock.release()


def _after_fork() -> None:
    global _forked, _lock, _replica_threads
    _lock = threading.RLock()
    _replica_threads = 0
    _forked = _thread.model or _process or _forked
    for model in {_thread.model, _process, _before}:
        if model is not None:
            model.disown()


def _at_exit() -> None:
    """Tell the others that this program has come to its end, unless an exception ended it."""
    if not hasattr(sys, "last_type"):
        for model in {_process, _before}:
            if model is not None:
                model.say_farewell("ended its program")


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
