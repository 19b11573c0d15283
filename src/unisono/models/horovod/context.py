"""Horovod contexts: initialisation, shutdown, facts, and wrapping of optimizers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from unisono.control.rendezvous import host_of_this_process
from unisono.errors import AlreadyInitializedError, ContextError
from unisono.model.contract import ComputationModel
from unisono.model.handle import SafeFuture
from unisono.models.horovod.rendezvous import wait_for_all
from unisono.topology import ContextHint, RankInfo, Topology

LEAVE_S = 2.0
"""Seconds that a replica waits for Horovod's shutdown after a peer failed or timed out."""
DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def initialize(hvd: ModuleType, info: RankInfo, timeout_s: float) -> None:
    """Create a context that allows dynamic groups. Collective over all ranks of `info`."""
    if hvd.is_initialized():
        raise AlreadyInitializedError(
            "Horovod is initialised already in this process: use it as it is, or call "
            "hvd.shutdown() first"
        )
    if _is_mpi_over(hvd):
        raise ContextError(
            "Horovod can't be initialised again in this process: its first context ended MPI too; "
            "import mpi4py.MPI before the first initialize, and MPI lives as long as the process"
        )
    wait_for_all(os.environ, timeout_s)
    if DYNAMIC in os.environ:
        hvd.init()
    else:
        try:
            hvd.init(process_sets="dynamic")  # leaves the variable set
        finally:
            os.environ.pop(DYNAMIC, None)
    if hvd.size() == 1 < info.world_size:
        hvd.shutdown()
        raise ContextError(
            f"rank {info.rank} of {info.world_size} (from {info.source}) found itself alone in "
            "Horovod: start the program with horovodrun or mpirun, or use spawn"
        )


def leave(end: Callable[[], None], limit_s: float) -> None:
    """Shut Horovod down within a limit: its calls wait 30 s for a stopped peer."""
    # After the limit it continues in a thread, which the exit of the process may wait for.
    outcome, thread = SafeFuture.in_thread(end, "unisono-leaving")
    thread.join(limit_s)
    if outcome.is_known:
        outcome.wait()


def _is_mpi_over(hvd: ModuleType) -> bool:
    """Return whether Horovod would abort the process by using a finalized MPI."""
    if not hvd.mpi_built() or os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        return False
    is_over = ctypes.c_int(0)
    hvd.mpi_ops._basics.MPI_LIB_CTYPES.MPI_Finalized(ctypes.byref(is_over))
    return bool(is_over.value)


def topology_of(hvd: ModuleType, hint: ContextHint) -> Topology:
    """Return this replica's position, as far as Horovod's context has it."""
    local_rank = hvd.local_rank()
    node_rank: int | None = hvd.cross_rank()
    nnodes: int | None = hvd.cross_size()
    if local_rank > 0 and not hvd.mpi_ops.is_homogeneous():
        # Its cross numbers count only nodes that have this local rank.
        info = hint.environment
        is_same = info is not None and (info.rank, info.world_size) == (hvd.rank(), hvd.size())
        node_rank, nnodes = (info.node_rank, info.nnodes) if info and is_same else (None, None)
    if hint.local_rank is not None:
        local_rank = hint.local_rank
    return Topology(hvd.rank(), hvd.size(), local_rank, hvd.local_size(), node_rank, nnodes)


def placed(hvd: ModuleType, model: ComputationModel) -> Topology:
    """Return this replica's position, from the hosts of all. Collective over all ranks."""
    host = os.environ.get("HOROVOD_HOSTNAME") or host_of_this_process()
    own = Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    return own.among(model.exchange(host.encode()))


def device_of(hvd: ModuleType) -> torch.device:
    """Return the device for the local rank."""
    # Only the CPU's branch has been run: no build for GPUs was available.
    is_built = hvd.cuda_built() or hvd.rocm_built()
    if not is_built or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())


def wrap_optimizer(
    hvd: ModuleType, optimizer: Optimizer, is_averaged: bool, **options: Any
) -> Optimizer | None:
    """Create a ``DistributedOptimizer``, unless backward averages and no option is given."""
    if is_averaged and not options:
        return None
    made: Optimizer = hvd.DistributedOptimizer(optimizer, **options)
    return made


def settle_gradients(optimizer: Optimizer) -> Callable[[], None] | None:
    """Wait for the averages of a ``DistributedOptimizer``, and disable them in its step."""
    # Collective over all ranks.
    own: Any = optimizer
    if not hasattr(own, "skip_synchronize"):
        return None
    own.synchronize()
    skipping = own.skip_synchronize()
    skipping.__enter__()
    return partial(skipping.__exit__, None, None, None)
