"""The active context, looked up on every call so that it is never stale, and its state."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono import plugins, registry
from unisono.control.plane import ControlPlane, control_of
from unisono.control.signatures import from_here, site
from unisono.errors import (
    AlreadyInitializedError,
    ArgumentError,
    CollectiveError,
    ContextError,
    EnvironmentDetectionError,
    NoReplicaError,
)
from unisono.model.contract import ComputationModel
from unisono.model.handle import BACKGROUND, Background, Handle, SafeFuture
from unisono.model.reduction import ReduceOp
from unisono.models.serial import ChildOfRank, SerialModel
from unisono.recording.records import CallLog, job_of, job_of_process
from unisono.recording.status_page import close_all as close_pages
from unisono.topology import EVERYBODY, ContextHint, Group, RankInfo, Topology, name_of

T = TypeVar("T")
_context_ids = itertools.count(1)


class ContextState:
    """The facade's state for one context of any library; the model doesn't know this object."""

    def __init__(self, model: ComputationModel, calls: CallLog | None = None) -> None:
        self.model: ComputationModel = model
        if calls is not None:  # `_find_context` does so for the serial context, made on import
            plugins.begin_trace()
        topology = model.topology
        # The serial context and that of a rank's child have no status page, hence no log is given.
        self.calls: CallLog = calls or CallLog(topology.rank, topology.world_size, "", None)
        self.control: ControlPlane = control_of(model)
        self.context_id: int = next(_context_ids)
        self.is_activated: bool = False  # made by `activate`, and not adopted since
        # By their ranks, in ascending order and as given; () is that of this node.
        self.groups: dict[tuple[int, ...], Group] = {}
        self.interrupted: CollectiveError | None = None  # why no collective may follow
        # In a context created outside unisono, the first call over all ranks exchanges their hosts.
        self.must_introduce: bool = False
        self.hosts: Sequence[bytes] = ()
        self.backgrounds: dict[str, Background] = {}  # threads for started calls, by group
        self.flat_buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}  # for averaging

    def renew(self, model: ComputationModel) -> None:
        """Replace the model of the same library context, and keep all state of the old one."""
        # Shared state of the ranks must not be created again on only some of them.
        control = control_of(model)
        control.take_over(self.control)
        self.model, self.control, self.is_activated = model, control, False

    def forget_ended(self) -> None:
        """Drop the state of groups that have ended."""
        while self.control.ended:  # emptied, as names are added whenever the model ends a group
            name = self.control.ended.popleft()
            self.calls.forget(name)
            self.backgrounds.pop(name, None)

    def finalize(self) -> None:
        """End the context, after its background calls. Collective over all its ranks."""
        self.settle_all()
        self.groups.clear()
        self.model.finalize()
        self.calls.close()

    def release(self) -> None:
        """Release a context that has ended by itself."""
        self.groups.clear()
        self.calls.close()
        self.control.close()

    def disown(self) -> None:
        """Release the resources inherited by a forked child."""
        self.backgrounds = {}  # a fork doesn't have their threads
        self.calls.disown()
        self.control.disown()

    def interrupt(self, who: str, how: str) -> None:
        """Record that a collective was interrupted, and notify ranks that wait for this one."""
        # Local. Waits at most a second for a rank that doesn't read the message.
        if self.interrupted is None:
            self.interrupted = CollectiveError(
                f"{who}: {how}, so the ranks are out of step: end the job, or finalize() and "
                "initialize again"
            )
            self.control.interrupt(how)

    def check_whole(self) -> None:
        """Raise if a collective was interrupted earlier."""
        if self.interrupted is not None:
            # A copy, as the traceback of a raised error keeps its frames alive.
            raise type(self.interrupted)(*self.interrupted.args)

    def start(self, call: Callable[[], T], group: Group | None) -> Handle[T]:
        """Start `call`, which uses the collectives of a group, without waiting for it."""
        # Each group's background thread runs the calls in order, with the caller's deadline and
        # line. The call runs in this thread if the model allows no others, or if the first call
        # over all ranks, whose result decides how groups connect, isn't done yet.
        self.check_whole()
        if not (self.control.allows_threads and self.control.is_connected(None)):
            self.settle(group)
            # The future keeps errors for the handle's caller, but Ctrl-C is raised here at once.
            outcome: SafeFuture[T] = SafeFuture()
            outcome.of(call, is_own=lambda error: isinstance(error, Exception))
            return Handle(outcome.wait, lambda: outcome.is_known)
        name = self._queue_of(group)
        if name not in self.backgrounds:
            background = Background(f"{BACKGROUND}-{self.model.name}-{self.context_id}")
            # Another thread may have been faster; the thread of an unused object ends by itself.
            self.backgrounds.setdefault(name, background)
        return self.backgrounds[name].submit(partial(from_here().run, call))

    def _queue_of(self, group: Group | None) -> str:
        """Return the name of the group whose background thread runs the calls over `group`."""
        return name_of(group) if self.control.separates_groups else EVERYBODY

    def start_all_reduce(
        self, tensor: Tensor, op: ReduceOp, group: Group | None = None
    ) -> Handle[Tensor]:
        """Start the model's `all_reduce`, natively or in the background."""
        # Collective over `group`.
        # None from the model means that its library has no such call.
        started = self.model.start_all_reduce(tensor, op, group)
        if started is not None:
            return started
        return self.start(lambda: self.model.all_reduce(tensor, op, group), group)

    def settle(self, group: Group | None = None) -> None:
        """Wait for pending calls of `start` over a group, as every rank keeps one order."""
        background = self.backgrounds.get(self._queue_of(group)) if self.backgrounds else None
        if background is not None:
            background.settle()
        if self.control.is_lazy:
            self.control.settle()

    def settle_all(self) -> None:
        """Wait for pending calls of `start` over every group."""
        for background in list(self.backgrounds.values()):
            background.settle()
        self.settle()


_NO_HINT = ContextHint()
_OF_RANK = "unisono: of rank"
_serial = ContextState(SerialModel())


class _Slot(threading.local):
    context: ContextState | None = None


_thread = _Slot()
_process: ContextState | None = None  # of all threads that have no context in `_thread`
_previous: ContextState | None = None  # forgotten, but alive; found again, it keeps its state
_forked: ContextState | None = None  # of the rank that forked or started this process
_replica_threads = 0
_local_rank: int | None = None
_lock = threading.RLock()


def current() -> ContextState:
    """Return the active context."""
    # The thread's context has priority, then the process's, then one that was created outside
    # unisono and that a model finds, then the serial one.
    context = _thread.context or _process
    if context is not None and context.model.is_alive():
        return context
    return _find_context()


def current_model() -> ComputationModel:
    """Return the model of the active context."""
    return current().model


def communicator(group: Group | None = None, settles: bool = True) -> ContextState:
    """Return the active context for a collective, once calls started over the group are done."""
    # A caller passes `settles=False` if its call joins the queue of started calls, or if it calls
    # `settle` itself once it has resolved its group.
    context = _thread.context or _process  # as in `current`: a call would cost every collective
    if context is None or not context.model.is_alive():
        context = _find_context()  # comes first, because it may set `_forked`
    if _forked is not None:  # this process is a fork, or multiprocessing has started it in a rank
        refuse_fork(context)
    if context.interrupted is not None:
        context.check_whole()
    # A lazy device has no background calls, but pending computations, which must run before a
    # collective, as that is a separate graph.
    if settles and (context.backgrounds or context.control.is_lazy):
        context.settle(group)
    return context


def refuse_fork(context: ContextState) -> None:
    """Raise if this process is a fork of the process that created `context`."""
    # A fork may create a context of its own, and use that.
    if _forked is not None and context.context_id == _forked.context_id:
        relation = "was made by" if isinstance(context.model, ChildOfRank) else "is a fork of"
        raise ContextError(
            f"this process {relation} rank {context.model.topology.rank}, whose connections it "
            "must not use: call this in the process that called initialize() (not in a DataLoader "
            "worker, but in the loop that reads from it), or start new processes with spawn()"
        )


def left_half_way(call: str, error: BaseException) -> None:
    """Mark the context as broken after an asynchronous exception such as Ctrl-C."""
    # Not `current`: a call with peers has bound its context already, so none is searched for.
    context = _thread.context or _process
    if context is None or _forked is not None:  # a child of a rank has no connections
        return
    topology = context.model.topology
    if topology.world_size > 1:
        who = f"rank {topology.rank} of {topology.world_size}"
        line = site().decode("utf-8", "replace")
        context.interrupt(who, f"{type(error).__name__} interrupted {call} at {line}")


def _find_context() -> ContextState:
    """Return a context created elsewhere or inherited, or else the serial one."""
    with _lock:
        context = _live_context() or _adopt() or _of_parent()
    if context is not None:
        return context
    if _replica_threads:
        raise NoReplicaError(
            f"thread {threading.current_thread().name!r} isn't a replica, while the replicas of "
            "this process are threads: make the call in the function that was given to spawn"
        )
    if not _serial.calls.job:  # not used before
        _serial.calls.job = job_of_process(os.getpid())
        plugins.begin_trace()
    return _serial


def _adopt() -> ContextState | None:
    """Adopt a context that was created outside unisono, once per process."""
    global _process, _previous
    model = registry.probe(_NO_HINT)
    if model is not None:  # only then load the environment's readers
        model = registry.probe(ContextHint(_local_rank, detect_environment()))
    previous, _previous = _previous, None
    if model is None:  # each call of a program that is alone gets here, so this must be fast
        if previous is not None and not previous.model.is_alive():
            previous.release()
        return None
    # A context that is found again keeps its state. In a forked child it keeps the parent's state,
    # by whose id `refuse_fork` recognizes it.
    of_type = [each for each in (previous, _forked) if each and type(each.model) is type(model)]
    context = next((each for each in of_type if each.model.is_alive()), None)
    if previous is not None and previous is not context:
        previous.release()
    if context is not None:
        context.renew(model)
    else:
        topology, job = model.topology, job_of(detect_environment())
        calls = CallLog.of_rank(topology.rank, topology.world_size, job, model=model.name)
        context = ContextState(model, calls)
        context.must_introduce = topology.world_size > 1
    if context.control.is_thread_bound:  # each thread of the process may be a different replica
        _thread.context = context
    else:
        _process = context
    _pass_to_children()
    return context


class _Config(dict[str, Any]):
    """Attributes that multiprocessing copies to new processes, with the rank that starts them."""

    def copy(self) -> dict[str, Any]:
        """Return a copy with the facts of this thread's rank."""
        # Called by `multiprocessing.Process`, in the thread that creates the process.
        attributes = dict(self)
        context = _thread.context or _process
        model = None if context is None else context.model
        if model is not None and model.topology.world_size > 1 and model.is_alive():
            facts = (astuple(model.topology), model.name, model.backend, str(model.device))
            # By this pid, the new process knows that the facts are those of its parent.
            attributes[_OF_RANK] = (os.getpid(), *facts)
        return attributes


def _pass_to_children() -> None:
    """Pass this rank's facts to the processes that multiprocessing creates, forked or not."""
    process: Any = multiprocessing.current_process()
    config = getattr(process, "_config", None)  # its other content, such as a key, is kept
    if config is None:  # the attribute is private, so an implementation may lack it
        return
    if not isinstance(config, _Config):
        process._config = config = _Config(config)
    if _process is not None:  # this process has facts of its own now
        config.pop(_OF_RANK, None)


def _of_parent() -> ContextState | None:
    """Return a context with the facts of the rank that started this process; None without one."""
    # Such a process is, for example, a DataLoader's worker.
    global _process, _forked
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    pid, *facts = config.get(_OF_RANK, (os.getpid(),))  # without facts as in the rank itself
    if pid == os.getpid():  # no rank has started this process
        return None
    topology, *others = facts
    _process = _forked = ContextState(ChildOfRank(Topology(*topology), *others))
    return _process


def _live_context() -> ContextState | None:
    """Return the thread's or the process's context if it is alive; release one that has ended."""
    global _process
    if _thread.context is not None and not _thread.context.model.is_alive():
        _thread.context = None
    if _process is not None and not _process.model.is_alive():
        _process.release()
        _process = None  # a reference would keep torch's process group listening
    return _thread.context or _process


def detect_environment() -> RankInfo | None:
    """Read this process's rank from its variables; None also for a partial set of them."""
    try:
        return plugins.read_environment(os.environ)
    except EnvironmentDetectionError:
        return None


def activate(
    make: Callable[[], ComputationModel],
    record: Callable[[], CallLog],
    cls: type[ComputationModel] | None = None,
) -> ContextState:
    """Create the context of the process, or of the thread if the model is bound to it."""
    # Collective over the ranks of the new context.
    global _process
    with _lock:
        live: ContextState | None = current()  # adopts one that was created outside unisono, too
        if _forked is not None and live is not None and live.context_id == _forked.context_id:
            if type(live.model) is cls:  # the library has the parent's context, and can't have two
                refuse_fork(live)
            live = None  # another library's context may replace that of the parent here
        if live is not None and live is not _serial:
            # XLA's runtime creates the replicas, so a live context of XLA is not an error.
            joins = live.control.is_thread_bound and type(live.model) is cls
            if live.is_activated or not joins:
                topology = live.model.topology
                raise AlreadyInitializedError(
                    f"a {live.model.name} context is live already (rank {topology.rank} of "
                    f"{topology.world_size}): call finalize() first"
                )
        plugins.begin_trace()  # before the first call, `initialize`
        calls = record()
        try:
            with calls.begin("initialize"):
                model = make()
        except BaseException:  # Ctrl-C too: there is no context that would remove the page
            calls.close()
            raise
        # The library's numbers may differ from those of the variables.
        calls.become(model.topology.rank, model.topology.world_size)
        context = ContextState(model, calls)
        context.is_activated = True
        if context.control.is_thread_bound:
            _thread.context = context
        else:
            _process = context
        _pass_to_children()
        return context


def is_serial(model: ComputationModel) -> bool:
    """Return whether `model` is the default, active while no context exists."""
    return isinstance(model, SerialModel) and not isinstance(model, ChildOfRank)


def forget() -> None:
    """Release the process's context, so that the next call looks for one again."""
    global _process, _previous
    with _lock:
        _previous = _process or _previous  # `_adopt` uses the state again if the context is alive
        if _previous is not None and not _previous.model.is_alive():
            # Not only at the next call: a reference would keep torch's process group listening.
            _previous.release()
            _previous = None
        _process = None
        if _thread.context is not None and _thread.context.control.is_thread_bound:
            _thread.context = None  # `replica` unbinds the others


def set_local_rank(local_rank: int | None) -> None:
    """Set or remove the hint for contexts created outside unisono."""
    global _local_rank, _process, _previous
    is_rank = isinstance(local_rank, int) and not isinstance(local_rank, bool) and local_rank >= 0
    if local_rank is not None and not is_rank:
        raise ArgumentError(f"local_rank should be an int of at least 0, or None: {local_rank!r}")
    with _lock:
        _local_rank = local_rank
        # The next call adopts the context again, with the hint. One made by `activate` needs none.
        if _process is not None and not _process.is_activated:
            _previous, _process = _process, None


@contextmanager
def replica(context: ContextState) -> Iterator[None]:
    """Bind a context to this thread, or to the process if its main thread is one of many."""
    global _process, _replica_threads
    # A single replica isn't counted, because other threads beside it use the serial context.
    is_one_of_many = context.model.topology.world_size > 1
    is_process = is_one_of_many and threading.current_thread() is threading.main_thread()
    before, before_in_process = _thread.context, _process
    with _lock:
        # While there are any, a thread without a context is refused instead of being serial.
        _replica_threads += is_one_of_many and not is_process
        if is_process:  # the other threads of the process belong to the replica too
            _process = context
    _thread.context = context
    _pass_to_children()
    try:
        yield
    finally:
        _thread.context = before
        with _lock:
            _replica_threads -= is_one_of_many and not is_process
            if is_process:
                _process = before_in_process


def _before_fork() -> None:
    """Adopt a context that no call has used yet, so that the forked child can recognize it."""
    # Not blocking: `activate` holds the lock while it waits for its peers.
    if _process is None and _thread.context is None and _lock.acquire(blocking=False):
        try:
            with suppress(Exception):  # the next call reports the error, not the fork
                _adopt()
        finally:
            _lock.release()


def _after_fork() -> None:
    """Disown the parent's contexts in a forked child, which may only read their facts."""
    global _forked, _lock, _replica_threads
    _lock = threading.RLock()  # another thread of the parent may have held the old one
    _replica_threads = 0  # only the forking thread exists in the child
    _forked = _thread.context or _process or _forked
    for context in filter(None, {_thread.context, _process, _previous}):
        context.disown()


def _at_exit() -> None:
    """Report an orderly departure to peers, unless an exception ended the program."""
    # `sys.last_type` is set after an uncaught exception, which peers must see as a failure.
    if not hasattr(sys, "last_type"):
        for context in filter(None, {_process, _previous}):
            context.control.report_departure("ended its program")
        close_pages()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
