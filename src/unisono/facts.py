"""Facts about this replica, its job and its node, without communication."""

from __future__ import annotations

import logging
import socket
import warnings

import torch

from unisono import context, diagnosis
from unisono.context import ContextState, current, current_model
from unisono.errors import ContextError
from unisono.topology import Topology

_log = logging.getLogger(__name__)
_warned: set[int] = set()


def get_rank() -> int:
    """Return this replica's global rank.

    Returns:
        0 to ``get_world_size() - 1``; 0 if no context is active.

    Raises:
        NoReplicaError: this process runs its replicas as threads, and the calling thread isn't one
            of them.

    Example:
        >>> import unisono as idist
        >>> idist.get_rank()
        0
    """
    return current_model().topology.rank


def get_world_size() -> int:
    """Count the replicas of the job.

    Returns:
        At least 1.

    Raises:
        NoReplicaError: as in `get_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.get_world_size()
        1
    """
    return current_model().topology.world_size


def get_local_rank() -> int:
    """Return this replica's rank within its node.

    Returns:
        0 to ``get_nproc_per_node() - 1``.

    Raises:
        ContextError: the context was created outside unisono, and it isn't known which node each
            rank is on; the first collective finds out, but none has been called yet.

    Example:
        >>> import unisono as idist
        >>> idist.get_local_rank()
        0
    """
    return _known("local_rank", "local rank")


def get_nproc_per_node() -> int:
    """Count the replicas on this node.

    Returns:
        At least 1; nodes may differ.

    Raises:
        ContextError: as in `get_local_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.get_nproc_per_node()
        1
    """
    return _known("local_world_size", "number of replicas on this node")


def get_nnodes() -> int:
    """Count the nodes of the job.

    Returns:
        At least 1.

    Raises:
        ContextError: as in `get_local_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.get_nnodes()
        1
    """
    return _known("nnodes", "number of nodes")


def get_node_rank() -> int:
    """Return the rank of this node.

    Returns:
        0 to ``get_nnodes() - 1``.

    Raises:
        ContextError: as in `get_local_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.get_node_rank()
        0
    """
    return _known("node_rank", "rank of this node")


def _topology(active: ContextState) -> Topology:
    """Return the context's topology, completed from the hosts that its ranks exchanged."""
    topology = active.model.topology
    return topology.among(active.hosts) if active.hosts else topology


def _known(field: str, description: str) -> int:
    """Return a number of the topology; raise if the ranks have yet to exchange their hosts."""
    active = current()
    model, topology = active.model, _topology(active)
    value = getattr(topology, field)
    if value is None:
        hint = "set_local_rank(...) here, " if field == "local_rank" else ""
        raise ContextError(
            f"rank {topology.rank} of {topology.world_size}: the {description} can't be known "
            f"without communicating, because this {model.name} context was created outside "
            f"unisono: call {hint}sync() or any collective on every rank first, or start with a "
            "launcher that sets LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE, as "
            "torchrun does"
        )
    if topology.is_guess and active.context_id not in _warned:
        _warned.add(active.context_id)
        warnings.warn(
            f"the {description} of this {model.name} context, {value}, is a guess: all ranks are "
            "taken to be on one node; call set_local_rank(...) if they aren't",
            UserWarning,
            stacklevel=3,  # the line that called the public function
        )
    return int(value)


def device() -> torch.device:
    """Return the device that this replica computes on.

    Returns:
        This replica's accelerator, if the backend supports one; otherwise the CPU.

    Raises:
        NoReplicaError: as in `get_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.device().type in ("cpu", "cuda", "xpu", "mps")
        True
    """
    return current_model().device


def backend() -> str | None:
    """Return the name of the active context's backend.

    Returns:
        Such as ``"gloo"``; None if no context is active.

    Raises:
        NoReplicaError: as in `get_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.backend() is None
        True
    """
    model = current_model()
    return None if context.is_serial(model) else model.backend


def model_name() -> str:
    """Return the name of the active context's computation model.

    Returns:
        Such as ``"serial"`` or ``"native-dist"``.

    Raises:
        NoReplicaError: as in `get_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.model_name()
        'serial'
    """
    return current_model().name


def hostname() -> str:
    """Return the name of this host.

    Returns:
        The operating system's host name.

    Example:
        >>> import unisono as idist
        >>> isinstance(idist.hostname(), str)
        True
    """
    return socket.gethostname()


def is_distributed() -> bool:
    """Return whether a context other than serial is active.

    Returns:
        True even in a job of one replica.

    Raises:
        NoReplicaError: as in `get_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.is_distributed()
        False
    """
    return not context.is_serial(current_model())


def is_main_process() -> bool:
    """Return whether this replica has rank 0.

    Returns:
        True on rank 0, and if no context is active.

    Raises:
        NoReplicaError: as in `get_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.is_main_process()
        True
    """
    return current_model().topology.rank == 0


def set_local_rank(index: int | None) -> None:
    """Set the local rank for a context created outside unisono.

    Args:
        index: the local rank, at least 0; None removes an earlier hint.

    Raises:
        ArgumentError: `index` isn't an int of at least 0.

    Example:
        >>> import unisono as idist
        >>> idist.set_local_rank(None)
    """
    context.set_local_rank(index)


def show_config() -> None:
    """Log this replica's facts and how they were detected, at INFO.

    Raises:
        NoReplicaError: as in `get_rank`.

    Example:
        >>> import unisono as idist
        >>> idist.show_config()
    """
    active = current()
    model, topology = active.model, _topology(active)
    make_audible(_log)
    lines = {
        "distributed configuration": model.name,
        "backend": str(backend()),
        "device": model.device,
        "hostname": hostname(),
        "world size": topology.world_size,
        "rank": topology.rank,
        "local rank": topology.local_rank,
        "num processes per node": topology.local_world_size,
        "num nodes": topology.nnodes,
        "node rank": topology.node_rank,
        **diagnosis.lines(),
    }
    for name, value in lines.items():
        _log.info("%s: %s", name, "unknown" if value is None else value)


def make_audible(log: logging.Logger) -> None:
    """Enable a logger at INFO, on stderr by default, unless the user has set a level."""
    ours = logging.getLogger("unisono")
    if log.level == ours.level == logging.NOTSET:  # the root's WARNING is only a default
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        # If the root logger is given handlers later, those log the record and this one stays
        # silent.
        handler.addFilter(lambda _: not logging.getLogger().handlers)
        ours.addHandler(handler)
