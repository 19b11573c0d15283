"""Lifecycle of a context: `initialize`, `finalize`, `sync`, `spawn`, and a spawned rank's code."""

from __future__ import annotations

import inspect
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from typing_extensions import TypeVarTuple, Unpack

from unisono import context
from unisono.accelerators import accelerator
from unisono.arguments import LAST_PORT, check_count, check_names, check_variables, seconds
from unisono.collectives.call import introduce
from unisono.control.signatures import level, line_of_call
from unisono.deadlines import Limit, within
from unisono.environments.nodes import alone
from unisono.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    ContextError,
    EnvironmentDetectionError,
    UnisonoError,
    WorkerFailedError,
)
from unisono.launchers.job.lifetime import rank_function
from unisono.launchers.job.output import begin_lines_with_rank
from unisono.launchers.job.process_state import name_thread
from unisono.model.contract import ComputationModel
from unisono.model.launching import launch_hooks_of
from unisono.node import read_node
from unisono.options import InitializeOptions, ModelOptions, SpawnOptions
from unisono.plugins import OF_MODELS, by_name, load, read_environment, seats_nodes
from unisono.recording.records import CallLog, job_of
from unisono.recording.status_page import close_all as close_pages, pages
from unisono.registry import find_launcher, find_model
from unisono.topology import PREFIXED, LaunchPlan, RankInfo
from unisono.tracebacks import raised_here, say_instead

if TYPE_CHECKING:
    from unisono.launchers.job.job import Job


@dataclass(frozen=True, slots=True)
class Replica:
    """A user's function, and the context that it runs in."""

    backend: str
    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: Limit | None = None
    prefix_output: bool = False
    job: str = field(default_factory=partial(secrets.token_hex, 8))

    def __call__(self, info: RankInfo) -> Any:
        """Run as the only replica of a process. Collective over all ranks of `info`."""
        # After an exception the context isn't finalised: its connections stay open, so that the
        # parent receives this error before any error that it causes in other ranks. Threads that
        # outlive the function keep the context until they end: asynchronous checkpoints need it.
        cls = find_model(self.backend)
        if cls.replicas_are_threads:  # of a process that XLA's launcher has started
            return self.run(cls.initialize(self.backend, info, **self.options))
        if self.prefix_output and info.world_size > 1:
            begin_lines_with_rank(info.rank)  # before the backend's libraries print
        with within(self.limit):
            active = context.activate(
                lambda: cls.initialize(self.backend, info, **self.options),
                lambda: _log_of(info, self.backend, cls, self.job),
            )
            with rank_function():
                result = self.fn(info.local_rank, *self.args, **self.kwargs)
            if active.model.is_alive():  # the function may have ended it
                active.finalize()
        context.forget()
        return result

    def run(self, model: ComputationModel) -> Any:
        """Run as one of several threads, or as the only replica."""
        # Collective over all ranks of `model`.
        is_process = threading.current_thread() is threading.main_thread()
        # Threads share stdout, so only the lines of a process can be told apart.
        if self.prefix_output and is_process and model.topology.world_size > 1:
            begin_lines_with_rank(model.topology.rank)
        info = RankInfo(model.topology.rank, model.topology.world_size)
        active = context.ContextState(model, _log_of(info, self.backend, type(model), self.job))
        with context.replica(active), within(self.limit):
            with rank_function():
                result = self.fn(model.topology.local_rank, *self.args, **self.kwargs)
            active.finalize()  # only without an exception, as in `__call__`
            return result


def _log_of(info: RankInfo, backend: str, cls: type[ComputationModel], job: str = "") -> CallLog:
    """Create the log of a rank's calls, with its status page."""
    return CallLog.of_rank(
        info.rank,
        info.world_size,
        job_of(info, job),
        backend=backend,
        model=cls.name,
        variables=str(context.detect_environment()),  # read by `_refuse_child`
    )


T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PLAN_OPTIONS = frozenset(
    {"nnodes", "node_rank", "master_addr", "master_port", "init_method", "start_method"}
)
# Options of `spawn` that aren't passed on to the model as they are.
_LAUNCH_OPTIONS = {
    "join", "timeout", *(SpawnOptions.__optional_keys__ - ModelOptions.__optional_keys__),
}  # fmt: skip
_DEFAULT_LAUNCHER = "processes"
# Parameters of launchers that `_launch` passes itself; the others are `launcher_options`.
_PASSED_BY_LAUNCH = ("entry", "plan", "environ", "join", "stop_limit_s")


def best_backend() -> str:
    """Return the backend of ``unisono run --backend``, else the machine's best."""
    asked = os.environ.get("UNISONO_BACKEND")
    if asked:
        return asked
    kind = accelerator()
    return "gloo" if kind is None else torch.distributed.get_default_backend_for_device(kind)


def initialize(backend: str | None = None, **options: Unpack[InitializeOptions]) -> None:
    """Create a context and make it this process's.

    Collective over all ranks of the job.

    Args:
        backend: such as ``"gloo"``, ``"nccl"``, ``"cpu:gloo,cuda:nccl"``, ``"serial"`` or a
            plug-in's; None for the best one for this machine.
        options: ``rank`` and ``world_size`` (together; by default from the environment, else this
            process is alone), ``timeout`` (seconds or a timedelta, for set-up, else 60 s on torch's
            backends and MPI, and for each operation), and options of the model: on native
            ``init_method``, ``store``, ``device`` (a device, its name or its index),
            ``device_id``, ``pg_options``, ``group_name``.

    Raises:
        UnknownBackendError: no model has the backend.
        BackendUnavailableError: it is known, but can't be used here.
        ArgumentError: an unknown option, or a bad value.
        AlreadyInitializedError: a context is live, also if it was created outside unisono.
        EnvironmentDetectionError: the environment's variables are partial or inconsistent, or one
            of ours has a bad value.
        ContextError: the ranks couldn't meet; or a rank has started this program, which has
            inherited its variables.

    Warns:
        UserWarning: this process is alone, but its platform reports several nodes, whose ranks
            haven't been started.

    Example:
        >>> import unisono as idist
        >>> idist.initialize("gloo")
        >>> idist.model_name(), idist.get_world_size()
        ('native-dist', 1)
        >>> idist.finalize()
    """
    check_variables()
    name = best_backend() if backend is None else backend
    cls = find_model(name)
    check_names(f"initialize({name!r})", options, {*cls.options, "rank", "world_size"})
    given: dict[str, Any] = {**options}
    info = _pop_rank(given)
    # Models that create their replicas themselves don't meet through the launcher's variables.
    uses_variables = not (cls.replicas_are_threads or "launch" in cls.capabilities)
    if info.source == "none" and uses_variables:
        _warn_on_a_node(cls.launcher)
    if given.get("timeout") is not None:
        given["timeout"] = seconds("timeout", given["timeout"])
    # None stands for each option's default.
    given = {key: value for key, value in given.items() if value is not None}

    def make() -> ComputationModel:  # called once it is certain that no context is live
        # A rendezvous that is given here belongs to another job than the inherited variables.
        if uses_variables and not given.keys() & {"init_method", "store"}:
            _refuse_child(info)
        return cls.initialize(name.lower(), info, **given)

    context.activate(make, lambda: _log_of(info, name.lower(), cls), cls)
    if PREFIXED in os.environ:  # a program that `unisono run` has started
        name_thread(info.rank, info.world_size)


def _pop_rank(options: dict[str, Any]) -> RankInfo:
    """Remove rank and world size from the options; return them, else those of the environment."""
    rank, world_size = options.pop("rank", None), options.pop("world_size", None)
    if (rank is None) != (world_size is None):
        raise ArgumentError(f"rank={rank!r} and world_size={world_size!r} are given together")
    if rank is not None:
        world_size, rank = check_count("world_size", world_size), check_count("rank", rank, 0)
        if rank >= world_size:
            raise ArgumentError(f"rank={rank} should be below world_size={world_size}")
        detected = context.detect_environment()
        if detected is not None and (detected.rank, detected.world_size) == (rank, world_size):
            return detected  # the same rank, with the facts about its node
        port = os.environ.get("MASTER_PORT")
        return RankInfo(
            rank,
            world_size,
            master_addr=os.environ.get("MASTER_ADDR"),
            master_port=None if port is None else check_count("MASTER_PORT", port, 1, LAST_PORT),
        )
    detected = read_environment(os.environ)
    if detected is not None:
        return detected
    # "env://" stands for the variables, and without them this process is alone.
    if options.pop("init_method", None) not in (None, "env://"):
        raise ArgumentError("init_method= needs rank= and world_size= as well")
    return RankInfo(0, 1, 0, 1, 0, 1, source="none")


def _refuse_child(info: RankInfo) -> None:
    """Raise if a rank has started this program, which has inherited its variables."""
    # Otherwise both processes would wait for each other until they time out. A single rank waits
    # for no other. Without an id or a port, a different job may have the same variables.
    if info.world_size == 1 or not (info.job_id or info.master_port):
        return
    pages_of_rank = [page for page in pages() if page.facts.get("variables") == str(info)]
    pids = {page.facts["pid"] for page in pages_of_rank if page.is_alive()}
    # Without a page, psutil needn't be imported.
    ancestors = {each.pid for each in load("psutil:Process")().parents()} if pids else pids
    for pid in pids & ancestors:
        raise ContextError(
            f"rank {info.rank} of {info.world_size} is process {pid}, which has started this one: "
            "its launcher's variables are inherited. For a program alone call "
            "initialize('serial'), or start it with env= without the launcher's variables; for a "
            "separate job start it with `unisono run`"
        )


def _warn_on_a_node(launcher: str) -> None:
    """Warn that this process runs alone although its platform reports several nodes."""
    try:
        node = read_node()
    except EnvironmentDetectionError:  # a process that is alone doesn't need the node
        return
    if node is None or node.max_nnodes == 1:
        return
    row = by_name(OF_MODELS).get(launcher)
    if launcher == _DEFAULT_LAUNCHER:
        remedy = "start the script with unisono run, or call Parallel(), which starts them"
    elif row is None:
        remedy = f"start them by the launcher {launcher!r}"
    else:  # a model's own launcher, whose name isn't an option of `spawn`
        by = f"by {row.command}, or " if row.command else ""
        remedy = f"start them {by}by spawn() or Parallel() with nproc_per_node"
    text = (
        f"this process is alone: {node.source} reports {node.nnodes} nodes, and nothing has "
        f"started their ranks; {remedy}; pass rank=0, world_size=1 to run alone"
    )
    if node.hosts and launcher == _DEFAULT_LAUNCHER:  # the platform started only the first host
        text = alone(node)
    warnings.warn(text, UserWarning, stacklevel=level())


def finalize() -> None:
    """End the context: destroy it if `initialize` created it, else release it.

    Collective over all ranks of the job, if the library's own shutdown is. Does nothing if no
    context is active, as after an earlier `finalize`.

    Raises:
        CollectiveError: the library's own shutdown failed.
        ContextError: this process is a fork of the one that created the context.

    Example:
        >>> import unisono as idist
        >>> idist.finalize()
    """
    active = context.current()
    context.refuse_fork(active)
    try:
        active.finalize()
    finally:
        context.forget()


def sync(temporary: bool = False) -> None:
    """Find the live context again, and the ranks that share a node.

    Collective over all ranks at the first such call in a context created outside unisono, else
    local. Every call looks for the context itself, so this is only needed for the nodes.

    Args:
        temporary: accepted for compatibility with idist; a context is never kept after its end.

    Raises:
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.sync()
    """
    active = context.current()
    if not active.is_activated:
        active.settle_all()  # background calls may exchange the ranks' hosts
        context.forget()
    if context.current().must_introduce:
        introduce(context.communicator(), "sync")


@overload
def spawn(
    backend: str | None,
    fn: Callable[[int], T],
    args: tuple[()] = (),
    kwargs_dict: None = None,
    nproc_per_node: int = 1,
    **options: Unpack[SpawnOptions],
) -> list[T]: ...


@overload
def spawn(
    backend: str | None,
    fn: Callable[[int, Unpack[Ts]], T],
    args: tuple[Unpack[Ts]],
    kwargs_dict: None = None,
    nproc_per_node: int = 1,
    **options: Unpack[SpawnOptions],
) -> list[T]: ...


@overload
def spawn(
    backend: str | None,
    fn: Callable[[int, Unpack[tuple[object, ...]]], T],
    args: Sequence[Any],
    kwargs_dict: None = None,
    nproc_per_node: int = 1,
    **options: Unpack[SpawnOptions],
) -> list[T]: ...


@overload
def spawn(
    backend: str | None,
    fn: Callable[..., T],
    args: list[Any],
    kwargs_dict: None = None,
    nproc_per_node: int = 1,
    **options: Unpack[SpawnOptions],
) -> list[T]: ...


@overload
def spawn(
    backend: str | None,
    fn: Callable[..., T],
    args: Sequence[Any],
    kwargs_dict: Mapping[str, Any] | None,
    nproc_per_node: int = 1,
    **options: Unpack[SpawnOptions],
) -> list[T]: ...


@overload
def spawn(
    backend: str | None,
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    *,
    kwargs_dict: Mapping[str, Any] | None,
    nproc_per_node: int = 1,
    **options: Unpack[SpawnOptions],
) -> list[T]: ...


@overload
def spawn(
    backend: str | None,
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs_dict: Mapping[str, Any] | None = None,
    nproc_per_node: int = 1,
    *,
    join: bool,
    **options: Unpack[SpawnOptions],
) -> Job[T] | Any: ...


def spawn(
    backend: str | None,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs_dict: Mapping[str, Any] | None = None,
    nproc_per_node: int = 1,
    **options: Any,
) -> Any:
    """Run a function in replicas started for it, and return their results.

    In the replicas ``fn(local_rank, *args, **kwargs_dict)`` runs within a live context. The
    script isn't run there, so in processes `fn` must set up things such as logging again. While the
    main thread waits for processes, a SIGTERM or SIGHUP without a handler here is forwarded to
    them: if all return within ``grace``, this process continues; else the signal kills it.

    Args:
        backend: as in `initialize`.
        fn: any callable: a function of a module, a method, a closure, a lambda, or one of
            ``__main__``.
        args: its positional arguments after the local rank, a list or tuple.
        kwargs_dict: its keyword arguments.
        nproc_per_node: replicas on this node, at least 1.
        options: ``nnodes``, ``node_rank``, ``master_addr``, ``master_port`` or ``init_method`` for
            several nodes, each of which makes this call; ``start_method`` (``"forkserver"``, the
            default on Linux, ``"spawn"`` for a fresh interpreter each, ``"fork"`` for a copy of
            this process); ``join=False`` for a handle with ``join()`` and ``terminate()``;
            ``timeout`` (seconds or a timedelta, for each operation); ``grace`` (seconds or a
            timedelta for processes to save after a SIGTERM to this one, 30 by default, 0 for none:
            see above); ``daemon``, accepted for compatibility with idist: no replica outlives this
            process; ``prefix_output`` (whether each line that one of several processes prints
            begins with its rank, the default); ``launcher`` (``"torchrun"``, ``"mpi"``,
            ``"slurm"``, ``"ray"`` or a plug-in's, which starts the replicas) with
            ``launcher_options``, a dict of its own keywords; and options of `initialize`.

    Returns:
        A list of the results of `fn`, by rank of this node.

    Raises:
        UnknownBackendError: no model has the backend.
        BackendUnavailableError: it is known, but can't be used here.
        ArgumentError: a bad value, an unknown option, or a misspelt variable of ours; nothing was
            started.
        EnvironmentDetectionError: a variable of ours has a bad value; nothing was started.
        PayloadError: `fn` or its arguments can't be pickled.
        LaunchError: the replicas couldn't be started.
        WorkerFailedError: a replica failed; it contains the first failure's own traceback, and all
            other replicas have been ended.
        CollectiveTimeoutError: the deadline of a block around the call has passed; names the late
            ranks, which are being ended.

    Warns:
        UserWarning: this process is already rank 0 of several, each of which would start replicas
            of its own; not if ``nnodes`` or ``launcher`` is given.

    Example:
        >>> import unisono as idist
        >>> def square(local_rank, base):
        ...     return idist.all_reduce(base * base)
        >>> idist.spawn("threads", square, args=(3,), nproc_per_node=2)
        [18, 18]
    """
    warn_in_a_rank("spawn", nproc_per_node, options)
    cls, plan = check_job("spawn", backend, nproc_per_node, options)
    _check_call(fn, args, kwargs_dict)
    # Without join the replicas outlive the block, so its deadline doesn't apply to them.
    limit = Limit.here() if options.get("join") is not False else None
    replica = _replica(plan, options, fn, args, kwargs_dict, limit)
    if limit is not None and limit.left_s == 0:
        raise CollectiveTimeoutError("nothing was spawned: the block's deadline is over")
    try:
        return _launch(cls, replica, plan, options)
    except UnisonoError as error:
        # A replica may have been the first to notice that the block's deadline has passed.
        is_over = limit is not None and time.monotonic() >= limit.until
        if isinstance(error, WorkerFailedError) and (
            is_over and isinstance(error.__cause__, CollectiveTimeoutError)
        ):
            raise CollectiveTimeoutError(f"the block's deadline is over: {error}") from error
        raise raised_here(error) from error.__cause__  # without our frames, but with its cause
    except KeyboardInterrupt as error:
        say_instead(error, interrupted("spawn"))
        raise


def warn_in_a_rank(call: str, nproc_per_node: Any, options: Mapping[str, Any]) -> None:
    """Warn on rank 0 of several that each rank would start replicas of its own."""
    if options.get("launcher") is not None or options.get("nnodes") not in (None, 1, "1"):
        return  # on several nodes, each has to make this call
    try:
        model = context.current_model()
    except ContextError:  # a thread that isn't a replica
        return
    topology, info = model.topology, context.detect_environment()
    rank, world_size, source = topology.rank, topology.world_size, model.name
    if world_size == 1 and info is not None:  # a rank that hasn't been initialized yet
        rank, world_size, source = info.rank, info.world_size, f"{info.source} environment"
    if rank == 0 and world_size > 1:
        text = (
            f"replicas within a rank: {call} is called in rank 0 of {world_size} ({source}). If "
            f"every rank calls it, each starts {nproc_per_node} of its own. To run the function in "
            "the ranks that are there, use Parallel() without nproc_per_node; if this is intended, "
            'call warnings.filterwarnings("ignore", "replicas within a rank")'
        )
        warnings.warn(text, UserWarning, stacklevel=level())


def _replica(
    plan: LaunchPlan,
    options: Mapping[str, Any],
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs_dict: Mapping[str, Any] | None = None,
    limit: Limit | None = None,
) -> Replica:
    """Build the replica from the options that aren't the launcher's."""
    given = {key: value for key, value in options.items() if key not in _LAUNCH_OPTIONS}
    if options.get("timeout") is not None:
        given["timeout"] = seconds("timeout", options["timeout"])
    if plan.init_method is not None:
        given["init_method"] = plan.init_method
    prefix_output = options.get("prefix_output") is not False  # None means the default, True
    kwargs = dict(kwargs_dict or {})
    return Replica(plan.backend, fn, tuple(args), kwargs, given, limit, prefix_output)


def start_to_stay(
    backend: str | None, fn: Callable[..., Any], args: Sequence[Any], size: int, **options: Any
) -> Job[Any] | None:
    """Start ranks that stay within `fn`; return None if their model starts its own replicas."""
    cls, plan = check_job("WorkerPool", backend, size, options)
    if _find_launch(cls, options) is None:
        return None
    job: Job[Any] = _launch(cls, _replica(plan, options, fn, args), plan, options, join=False)
    return job


def run_to_end(
    backend: str | None, fn: Callable[..., Any], args: Sequence[Any], size: int, **options: Any
) -> None:
    """Run `fn` in replicas that their model starts itself, until all have returned."""
    cls, plan = check_job("WorkerPool", backend, size, options)
    _launch(cls, _replica(plan, options, fn, args), plan, options)


def check_stay(cls: type[ComputationModel], options: Mapping[str, Any]) -> None:
    """Raise if a launcher can't start ranks that stay, as a pool's ranks do."""
    launch = _find_launch(cls, options)
    if launch is not None and not _accepts(launch, "join"):
        raise ArgumentError(
            f"launcher {options.get('launcher') or cls.launcher!r} makes no replicas that stay: "
            "leave it out, or run functions with spawn()"
        )


def interrupted(call: str) -> str:
    """Return the text for a user's call that Ctrl-C ended, in place of a traceback."""
    return (
        f"{call} at {line_of_call()} was interrupted, and its replicas have been told to end\n"
        "KeyboardInterrupt (UNISONO_TRACEBACK=full shows where)"
    )


def _find_launch(
    cls: type[ComputationModel], options: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Return the launcher of the replicas; None if their model starts them itself."""
    given = options.get("launcher")
    if given is not None:
        return find_launcher(given)
    if "launch" in cls.capabilities:
        return None
    # `find_launcher` doesn't know the launchers of single models, as users can't name them.
    row = by_name(OF_MODELS).get(cls.launcher)
    return find_launcher(cls.launcher) if row is None else load(row.path)


def _launch(
    cls: type[ComputationModel],
    replica: Replica,
    plan: LaunchPlan,
    options: Mapping[str, Any],
    *,
    join: bool = True,
) -> Any:
    """Start the replicas through the model or a launcher."""
    launch, hooks = _find_launch(cls, options), launch_hooks_of(cls)
    if launch is None:
        _check_own_launch(cls.name, options)
        try:
            return hooks.launch(replica.run, plan, **replica.options)
        finally:  # not in the failed replica: its error would arrive after those of its victims
            close_pages(replica.job)
    if options.get("launcher") is None and cls.launcher in by_name(OF_MODELS):
        _check_own_launch(cls.name, options)
        # The launcher's keywords are options of the model.
        extra = {key: value for key, value in replica.options.items() if _accepts(launch, key)}
        rest = {key: value for key, value in replica.options.items() if key not in extra}
        replica = replace(replica, options=rest)
    else:
        extra = _launcher_options(launch, cls, replica.backend, options)
    # A rank that is stopped for longer than a collective may take ends the job.
    if replica.options.get("timeout") is not None and _accepts(launch, "stop_limit_s"):
        extra["stop_limit_s"] = replica.options["timeout"].total_seconds()
    if not join:
        extra["join"] = False
    return launch(replica, plan, environ=hooks.worker_environ(plan), **extra)


def _accepts(launch: Callable[..., Any], name: str) -> bool:
    """Return whether a launcher has a parameter of this name."""
    return name in inspect.signature(launch).parameters


def check_job(
    call: str, backend: str | None, nproc_per_node: Any, options: Mapping[str, Any]
) -> tuple[type[ComputationModel], LaunchPlan]:
    """Check a job's options; return its model and its plan."""
    check_variables()
    name = best_backend() if backend is None else backend
    cls = find_model(name)
    check_names(call, options, {"nproc_per_node", *cls.options, *_LAUNCH_OPTIONS})
    if options.get("timeout") is not None:
        seconds("timeout", options["timeout"])  # called only for its error
    if options.get("prefix_output") not in (None, True, False):
        raise ArgumentError(f"prefix_output={options['prefix_output']!r} should be True or False")
    return cls, _plan(name.lower(), nproc_per_node, options)


def _launcher_options(
    launch: Callable[..., Any],
    cls: type[ComputationModel],
    backend: str,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Check that a launcher supports the options; return the keywords for it alone."""
    name = options.get("launcher") or cls.launcher
    if cls.replicas_are_threads:
        raise ArgumentError(
            f"launcher={name!r}: the replicas of {backend} are threads, which it can't make: leave "
            "launcher out"
        )
    extra = dict(options.get("launcher_options") or {})
    known = [key for key in inspect.signature(launch).parameters if key not in _PASSED_BY_LAUNCH]
    check_names(f"launcher {name!r}", extra, known)
    if name == _DEFAULT_LAUNCHER:  # it supports everything that is refused below
        return {**extra, "join": options.get("join", True)}
    refused = [f"{key}=" for key in ("init_method", "start_method") if options.get(key) is not None]
    if options.get("join") is False:
        refused.append("join=False")
    if refused:
        raise ArgumentError(f"launcher {name!r} does not support {refused[0]}")
    return extra


def _check_call(fn: Any, args: Any, kwargs_dict: Any) -> None:
    if not callable(fn):
        raise ArgumentError(f"fn should be callable: {fn!r}")
    if not isinstance(args, (list, tuple)):
        raise ArgumentError(f"args={args!r} should be a list or tuple, such as ({args!r},)")
    if kwargs_dict is not None and not (
        isinstance(kwargs_dict, Mapping) and all(isinstance(key, str) for key in kwargs_dict)
    ):
        raise ArgumentError(f"kwargs_dict={kwargs_dict!r} should be a dict with keys of type str")


def _plan(backend: str, nproc_per_node: Any, options: Mapping[str, Any]) -> LaunchPlan:
    """Check the options of the launch plan, and build it."""
    given = {key: options[key] for key in _PLAN_OPTIONS if options.get(key) is not None}
    for name, least in (("nnodes", 1), ("node_rank", 0)):
        if name in given:
            given[name] = check_count(name, given[name], least)
    if "master_port" in given:
        given["master_port"] = check_count("master_port", given["master_port"], 1, LAST_PORT)
    if options.get("grace") is not None:
        given["grace_s"] = seconds("grace", options["grace"], may_be_zero=True).total_seconds()
    size = check_count("nproc_per_node", nproc_per_node)
    plan = LaunchPlan(size, backend=backend, **given)
    if plan.node_rank >= plan.nnodes:
        raise ArgumentError(f"node_rank={plan.node_rank} should be below nnodes={plan.nnodes}")
    address = [name for name in ("master_addr", "master_port") if name in given]
    if plan.init_method == "env://":  # it stands for the launcher's own rendezvous
        plan = replace(plan, init_method=None)
    elif plan.init_method is not None and address:
        raise ArgumentError(
            f"{address[0]}={given[address[0]]!r} and init_method={plan.init_method!r} are two "
            "rendezvous addresses: pass one"
        )
    seats = seats_nodes(options.get("launcher") or _DEFAULT_LAUNCHER)
    if plan.nnodes > 1 and not (len(address) == 2 or "init_method" in given or seats):
        raise ArgumentError(
            f"nnodes={plan.nnodes} needs master_addr= and master_port= of node 0, or init_method="
        )
    if plan.nnodes == 1 or seats:  # else each node makes this call, and would draw another id
        plan = replace(plan, job_id=secrets.token_hex(8))
    return plan


def _check_own_launch(model: str, options: Mapping[str, Any]) -> None:
    """Raise if a model that starts its replicas itself doesn't support an option."""
    if options.get("join") is False or options.get("nnodes", 1) not in (None, 1, "1"):
        raise ArgumentError(
            f"spawn on {model} takes neither join=False nor several nodes: start the processes "
            "with the launcher of its library, and call initialize() in them"
        )
    for name in ("start_method", "init_method", "master_addr", "master_port"):
        if options.get(name) is not None:
            raise ArgumentError(f"{model} starts its replicas itself and does not support {name}=")
