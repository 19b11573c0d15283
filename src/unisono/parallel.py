"""`Parallel`, which runs a function in replicas, however the script was started."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Literal, TypeVar

from typing_extensions import ParamSpec, Self, Unpack

from unisono import context, facts
from unisono.arguments import check_names, seconds
from unisono.control.signatures import level
from unisono.environments.nodes import ambiguity
from unisono.errors import (
    ArgumentError,
    ContextError,
    EnvironmentDetectionError,
    NotInitializedError,
)
from unisono.lifecycle import best_backend, check_job, finalize, initialize, spawn
from unisono.node import count_ranks, find_node, read_node, refuse_rank
from unisono.options import ParallelOptions
from unisono.plugins import read_environment
from unisono.registry import find_launcher, find_model
from unisono.topology import NodeInfo, RankInfo

P = ParamSpec("P")
T = TypeVar("T")

# Launchers that start only the ranks of this node; None is the default one.
_LAUNCHERS_OF_A_NODE = (None, "processes", "torchrun")
# Options that identify this rank or node.
_POSITION = ("node_rank", "init_method", "rank", "world_size")
_log = logging.getLogger(__name__)


class Parallel:
    """Run a function in replicas, either spawned here or already started by a launcher.

    Collective at creation if a launcher has started the replicas: every rank must then create it;
    otherwise creating it involves no other rank. With ``nproc_per_node`` each `run` spawns; without
    it the context is initialised from the environment on entry and finalised on exit.
    ``backend=None`` means the machine's best backend if the environment describes a job, else no
    context at all; under ``unisono run --backend`` it means that backend.

    Some platforms start one program per node (Kubeflow, SkyPilot, AWS Batch, SageMaker and others).
    Their environment variables identify the node, and `run` spawns this node's ranks, which connect
    to those of the other nodes. ``nproc_per_node`` then defaults to the number that the platform
    gives, else the number of accelerators, else of cores; it must be equal on all nodes. A job of
    one node has several ranks only if the platform says so. If the node has variables RANK and
    WORLD_SIZE, but none for its number of ranks (older PyTorchJobs, Volcano's plug-in pytorch, PAI,
    Azure), the node is assumed to run a single rank, unless ``nnodes="auto"`` is given.
    ``nnodes=1`` keeps a job on this node; but unless RANK is known to be a node rank, it still
    counts as this process's global rank. Under PBS and Grid Engine, which start a script only on
    the first host, ``nnodes="auto"`` on each host is needed.

    Args:
        backend: as in ``initialize``.
        nproc_per_node: replicas to spawn on this node.
        nnodes: nodes in the job; None for the platform's number, else 1. ``"auto"`` is the same,
            but also covers the cases above that need it, and raises where None would only warn.
        node_rank: rank of this node.
        master_addr: host of node 0, for several nodes.
        master_port: port there, for several nodes.
        init_method: a rendezvous URL, instead of address and port. Without `nproc_per_node`, rank
            and world size come from the environment.
        launcher: starts the replicas if `nproc_per_node` is given: ``"processes"`` (the
            default), ``"torchrun"``, ``"mpi"``, ``"slurm"``, ``"ray"`` or a plug-in's.
        spawn_kwargs: further options: of ``spawn`` if `nproc_per_node` is given, else of
            ``initialize``.

    Raises:
        UnknownBackendError: no model has the backend.
        ArgumentError: options about nodes, or a launcher, without `nproc_per_node`; an unknown
            launcher or option; a bad value.
        BackendUnavailableError: a requirement of the backend or the launcher isn't installed.

    Example:
        >>> import unisono as idist
        >>> with idist.Parallel("threads", nproc_per_node=2) as parallel:
        ...     parallel.run(lambda local_rank: idist.get_rank())
        [0, 1]
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int | None = None,
        nnodes: int | Literal["auto"] | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        init_method: str | None = None,
        launcher: str | None = None,
        **spawn_kwargs: Unpack[ParallelOptions],
    ) -> None:
        if backend is not None:
            find_model(backend)  # an unknown one is reported before bad options
        self._nnodes = nnodes
        # In these cases nnodes isn't an option of `spawn`, but decides how the environment is read.
        only_guides_detection = nnodes == "auto" or (nnodes == 1 and nproc_per_node is None)
        for_spawn = {
            "nnodes": None if only_guides_detection else nnodes,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "master_port": master_port,
            "launcher": launcher,
        }
        given = {name: value for name, value in for_spawn.items() if value is not None}
        if nproc_per_node is None and given:
            raise ArgumentError(f"{', '.join(given)} need nproc_per_node as well")
        self._backend = backend
        self._nproc_per_node = nproc_per_node
        self._options: dict[str, Any] = {**given, **spawn_kwargs}
        if init_method is not None:
            self._options["init_method"] = init_method
        self._check(for_spawn)
        # `grace` is removed only after the check, because `initialize` has no such option.
        self._grace = {"grace": self._options.pop("grace", None)}  # for the ranks that `run` spawns
        self._count = nproc_per_node
        self._node_options: dict[str, Any] = {}  # of this node, as options of `spawn`
        # Reasons why this process couldn't be placed in a job of several nodes.
        self._warnings: list[str] = []
        self._is_entered = False
        self._has_context = False

    def _check(self, for_spawn: Iterable[str]) -> None:
        """Raise early if `spawn` or `initialize` would."""
        if self._nnodes == "auto":
            self._check_auto()
        if "launcher" in self._options:
            find_launcher(self._options["launcher"])
        if self._nproc_per_node is not None:
            check_job("Parallel", self._backend, self._nproc_per_node, self._options)
        elif self._options:  # a process that stays alone would ignore a misspelt option
            cls = find_model(self._backend or best_backend())
            others = ("rank", "world_size", "nproc_per_node", "grace", *for_spawn)
            check_names("Parallel", self._options, {*cls.options, *others})
            if self._options.get("grace") is not None:
                seconds("grace", self._options["grace"], may_be_zero=True)

    def _check_auto(self) -> None:
        """Raise if `nnodes="auto"` can't apply to the other arguments."""
        launcher = self._options.get("launcher")
        if launcher not in _LAUNCHERS_OF_A_NODE:
            raise ArgumentError(f"nnodes='auto' is not for the launcher {launcher!r}")
        if not self._can_spawn_on_nodes():
            raise ArgumentError(f"nnodes='auto' is not for the backend {self._backend!r}")
        given = [name for name in _POSITION if self._options.get(name) is not None]
        if given:
            raise ArgumentError(
                f"nnodes='auto' does not support {'=, '.join(given)}=: it detects the node"
            )

    @property
    def backend(self) -> str | None:
        """The backend argument."""
        return self._backend

    def __enter__(self) -> Self:
        self._find_node()
        self._is_entered = True
        # If RANK is wrong, this raises, and no warning says that the process continues alone.
        lone_options = self._options_if_alone() if self._count is None else {}
        for text in self._warnings:
            warnings.warn(text, UserWarning, stacklevel=level())
        if self._count is not None:
            return self  # each `run` spawns
        if self._backend is None and (lone_options or read_environment(os.environ) is None):
            return self  # alone and without a backend, so the serial context stays
        initialize(self._backend, **self._options, **lone_options)
        self._has_context = True
        self._log_info(f"initialised: {facts.model_name()}, backend {facts.backend()}")
        return self

    def _find_node(self) -> None:
        """Detect whether this process stands for a node of several, whose ranks it must start."""
        self._count, self._node_options, self._warnings = self._nproc_per_node, {}, []
        # Without a backend, the node's variables are always read, to warn if this process will run
        # alone.
        if not self._may_be_node() or not (self._backend is None or self._can_spawn_on_nodes()):
            return
        is_auto = self._nnodes == "auto"
        # `__enter__` shows the warnings once no error can follow.
        node = find_node(self._warnings.append, is_asked=is_auto, may_be_several=True)
        if is_auto and self._count is not None:  # else each process would start a job of its own
            if node is None:
                refuse_rank("nnodes='auto'")
            elif node.is_ambiguous:
                raise ambiguity(node)
        if node is None or node.is_ambiguous or not self._can_spawn_on_nodes():
            return
        if node.node_rank is None:
            raise ArgumentError(
                f"{node.source} leaves {node.nnodes} to {node.max_nnodes} nodes to agree on their "
                "node ranks, which Parallel doesn't support: start the script with unisono run"
            )
        if self._count is None:
            counts_nodes = is_auto and node.max_nnodes > 1  # then WORLD_SIZE is surely not a rank's
            rank = None if counts_nodes else context.detect_environment()
            self._count = _ranks_to_start(node, None if rank is None else rank.world_size)
        if self._count is None or node.max_nnodes == 1:
            return
        self._node_options = {
            "nnodes": node.nnodes,
            "node_rank": node.node_rank,
            "master_addr": node.master_addr,
            "master_port": node.master_port,
        }
        check_job("Parallel", self._backend, self._count, {**self._node_options, **self._options})
        self._log_info(
            f"node {node.node_rank} of {node.nnodes}, according to {node.source}: {self._count} "
            f"processes here, node 0 is {node.master_addr}, port {node.master_port}"
        )

    def _options_if_alone(self) -> dict[str, Any]:
        """Return options of `initialize` for one replica if this process is known to be alone."""
        is_known = self._nnodes == 1 or self._warnings
        if not is_known or "rank" in self._options or not self._can_spawn_on_nodes():
            return {}
        if self._nnodes != 1:  # unless nnodes=1 was given, a wrong RANK must still raise
            is_rank = read_environment(os.environ) is not None
        elif (rank := context.detect_environment()) is None:
            is_rank = False
        else:  # variables of srun and mpirun always number ranks; RANK alone may number nodes
            is_rank = rank.source != "torchrun" or not self._is_node_number(rank)
        return {} if is_rank else {"rank": 0, "world_size": 1}

    def _is_node_number(self, rank: RankInfo) -> bool:
        """Return whether a detected rank is really this node's number, by its platform."""
        if self._options.get("init_method") is not None:
            return False  # init_method needs a rank
        try:
            node = read_node()
        except EnvironmentDetectionError:
            # The node's variables are faulty; a launcher of ranks would also set LOCAL_RANK.
            return rank.local_rank is None
        return node is not None and not node.is_ambiguous

    def _may_be_node(self) -> bool:
        """Return whether this process may stand for a node: nothing yet says which it is."""
        if any(self._options.get(name) is not None for name in ("nnodes", *_POSITION)):
            return False
        if self._nnodes == 1 or self._options.get("launcher") not in _LAUNCHERS_OF_A_NODE:
            return False
        if self._nproc_per_node is None and self._nnodes != "auto":
            info = context.detect_environment()
            if info is not None and info.local_rank is not None:  # a launcher has started the ranks
                return False
        try:
            # The ranks of a larger context are running already.
            return context.current_model().topology.world_size == 1
        except ContextError:  # a thread that isn't a replica
            return False

    def _can_spawn_on_nodes(self) -> bool:
        """Return whether the backend's replicas are processes of our own launcher."""
        cls = find_model(self._backend or best_backend())
        starts_own_replicas = cls.replicas_are_threads or "launch" in cls.capabilities
        return cls.launcher == "processes" and not starts_own_replicas

    def run(
        self, fn: Callable[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Run ``fn(local_rank, *args, **kwargs)`` in every replica.

        Collective over all ranks if a launcher has started the replicas, else local.

        Args:
            fn: as in ``spawn``.
            args: its positional arguments after the local rank.
            kwargs: its keyword arguments.

        Returns:
            The results of `fn`: one per replica of this node, in order of local rank, if replicas
            were spawned; else a list of this rank's result.

        Raises:
            NotInitializedError: called outside the ``with`` block.
            WorkerFailedError: a spawned replica failed.
        """
        if not self._is_entered:
            raise NotInitializedError("Parallel.run works inside of its with block")
        if self._count is None:
            self._log_info(f"run {_describe_work(fn, facts.get_world_size())}")
            results = [fn(facts.get_local_rank(), *args, **kwargs)]
        else:
            count, options = self._count, {**self._node_options, **self._options, **self._grace}
            self._log_info(f"spawn {_describe_work(fn, count)}")
            results = spawn(self._backend, fn, args, kwargs, nproc_per_node=count, **options)
        self._log_info("end of run")
        return list(results)

    def _log_info(self, text: str) -> None:
        """Log a line on rank 0."""
        if facts.is_main_process():
            facts.make_audible(_log)
            _log.info("%s", text)

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        self._is_entered = False
        if not self._has_context:
            return
        self._has_context = False
        if error is None:
            finalize()
        else:  # finalize() would wait for ranks that may never arrive
            context.current_model().abort()
            context.forget()


def _describe_work(fn: Callable[..., Any], count: int) -> str:
    """Return a function's name and its number of ranks as text."""
    name = getattr(fn, "__qualname__", None)
    called = f"{fn.__module__}.{name}" if name else repr(fn)
    return f"{called} in {count} rank{'s' if count > 1 else ''}"


def _ranks_to_start(node: NodeInfo, world_size: int | None) -> int | None:
    """Return the number of ranks to start on a node; None if this process is the only one."""
    # If RANK and WORLD_SIZE may describe a rank rather than a node, the process remains that single
    # rank, unless the platform asks for several ranks on a node. With one rank on each node, the
    # numbers are right for nodes and ranks; with several, only for nodes.
    given, is_only_node = node.nproc_per_node, node.max_nnodes == 1
    if not is_only_node and world_size is None:
        return count_ranks("nproc_per_node", given or "auto")
    if given is None or (is_only_node and world_size not in (None, 1)):
        return None
    count = count_ranks("nproc_per_node", given)
    return count if count > 1 else None
