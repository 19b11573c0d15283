"""Model of replicas that Horovod connects: under horovodrun, mpirun, or unisono's launcher."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import horovod.torch as hvd  # type: ignore[import-not-found,import-untyped,unused-ignore]
import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.arguments import only_timeout_s
from unisono.control.absent_ranks import LOOK_S, Wait
from unisono.control.plane import SocketControlPlane
from unisono.control.rendezvous import host_of_this_process
from unisono.deadlines import DEFAULT_TIMEOUT_S, limit_of
from unisono.errors import (
    AlreadyInitializedError,
    CollectiveError,
    CollectiveMismatchError,
    ContextError,
    PayloadError,
    PeerFailedError,
    UnsupportedOperation,
)
from unisono.model.contract import ComputationModel
from unisono.model.handle import Handle, SafeFuture
from unisono.model.reduction import ReduceOp
from unisono.model.training import TrainingHooks
from unisono.models.horovod.setup import wait_for_all
from unisono.topology import ContextHint, Group, RankInfo, Topology, name_of

if TYPE_CHECKING:
    from typing_extensions import Self

if not hasattr(hvd, "init"):  # without its extension horovod.torch only prints a warning
    raise ImportError(
        "horovod was installed without its extension for torch: install it again beside torch, "
        "with HOROVOD_WITH_PYTORCH=1, so that the build reports the missing part"
    )

_log = logging.getLogger(__name__)
_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
_LEAVE_S = 2.0  # for Horovod's shutdown after a peer has failed or timed out
Start = Callable[..., int]
"""Function that starts an operation, given `name` and `process_set`; returns Horovod's handle."""
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
_ERRORS: dict[str, type[CollectiveError]] = {
    "^Mismatched": CollectiveMismatchError,
    "horovod has been shut down|not been initialized|closed by peer|reset by peer": PeerFailedError,
}
_MAX_COUNT = 2**31 - 1
_ASYNC_NAMES = 512  # fewer than Horovod's response cache holds, 1024
_OPS = {
    ReduceOp.SUM: hvd.Sum,
    ReduceOp.PRODUCT: hvd.Product,
    ReduceOp.MIN: hvd.Min,
    ReduceOp.MAX: hvd.Max,
}


class HorovodModel(ComputationModel, TrainingHooks):
    """The Horovod context of this process, created here or by the user's ``hvd.init()``."""

    # Each context has one instance, however often it is adopted, so that the numbers of calls
    # stay equal on all ranks.
    # Horovod itself has all_gather, broadcast, all_to_all, all_reduce by SUM, PRODUCT, MIN and MAX,
    # reduce_scatter by SUM, asynchronous all_reduce, and groups (its process sets). Derived are
    # reduce, scatter, all_reduce by AND, OR and XOR, and reduce_scatter by all but SUM. Narrow
    # integers are reduced as int32. Horovod moves no bfloat16. Nor is float16 in `dtypes`: its sums
    # as float32 are rounded once, while Horovod would round them at each rank.

    name: ClassVar[str] = "horovod-dist"
    backends: ClassVar[tuple[str, ...]] = ("horovod",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"groups"})
    launcher: ClassVar[str] = "horovod"
    options: ClassVar[frozenset[str]] = frozenset({"timeout", "hosts", "use_gloo", "verbose"})
    dtypes: frozenset[torch.dtype] = _NARROW | frozenset(
        {torch.int32, torch.int64, torch.float32, torch.float64}
    )
    topology: Topology = Topology(0, 1)
    _current: ClassVar[HorovodModel | None] = None

    def __init__(self, topology: Topology, is_owner: bool, timeout_s: float) -> None:
        # hvd.init() creates a new map each time; this reference keeps the map's identity unique.
        self._identity = hvd.mpi_ops._handle_map
        self.topology = topology
        self._device = _device()
        self._is_owner = is_owner
        self.control: SocketControlPlane = SocketControlPlane(self, timeout_s)
        # Horovod's handles of unfinished operations, by kind of call and name in Horovod.
        self._under_way: dict[str, int] = {}
        self._numbers: dict[str, int] = {}  # of asynchronous calls so far, by group
        self._n_groups_made = 0
        HorovodModel._current = self

    @classmethod
    def why_unavailable(cls, backend: str) -> str | None:
        if hvd.gloo_built() or hvd.mpi_built():
            return None
        return (
            "horovod was built with neither gloo nor MPI: install it again with "
            "HOROVOD_WITH_GLOO=1 (needs cmake) or HOROVOD_WITH_MPI=1"
        )

    @classmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        if not hvd.is_initialized():
            return None
        model = cls._current
        if not isinstance(model, cls) or not model.is_alive():
            model = cls(_topology(hint), False, DEFAULT_TIMEOUT_S)
        elif not model._is_owner:  # a context made here measured its topology
            model.topology = _topology(hint)
        return model

    @classmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        timeout_s = only_timeout_s("initialize on horovod", options) or DEFAULT_TIMEOUT_S
        _initialize(info, timeout_s)
        model = cls(_topology(ContextHint()), True, timeout_s)
        if model._device.type != "cpu":
            torch.accelerator.set_device_index(model._device.index)
        host = os.environ.get("HOROVOD_HOSTNAME") or host_of_this_process()
        # Without Horovod's node numbers, which count only the nodes that have this local rank.
        position = Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
        model.topology = position.among(model.exchange(host.encode()))
        return model

    def finalize(self) -> None:
        self.control.close()
        if not (self._is_owner and self.is_alive()):
            return
        # `limit_of` returns no None here, as each context of Horovod has a timeout.
        _leave(self._end, (limit_of(self.control.timeout_s) or 0.0) + _LEAVE_S)

    def _end(self) -> None:
        try:
            # The first rank that shuts down breaks the others' pending operations, so all ranks
            # meet before, in a reduction, because hvd.barrier can't time out.
            mark = torch.zeros(1, dtype=torch.int32)
            start = partial(hvd.allreduce_async_, mark, op=hvd.Sum)
            self._run("barrier", None, 1, start, ".barrier")
        except CollectiveError as error:
            _log.debug("shutting Horovod down without the others: %s", error)
        hvd.shutdown()

    def abort(self) -> None:
        self.control.close(how="")
        if self._is_owner and self.is_alive():
            _leave(hvd.shutdown, _LEAVE_S)

    def is_alive(self) -> bool:
        return bool(hvd.is_initialized()) and hvd.mpi_ops._handle_map is self._identity

    @property
    def device(self) -> torch.device:
        if self._device.type == "cpu" or self._is_owner:
            return self._device
        # A program whose context was adopted may change its current device at any time.
        return torch.device(self._device.type, torch.accelerator.current_device_index())

    def wrap_optimizer(
        self, optimizer: Optimizer, *, is_averaged: bool, **options: Any
    ) -> Optimizer | None:
        if is_averaged and not options:
            return None
        made: Optimizer = hvd.DistributedOptimizer(optimizer, **options)
        return made

    def settle_gradients(self, optimizer: Optimizer) -> Callable[[], None] | None:
        wrapped: Any = optimizer
        if not hasattr(wrapped, "skip_synchronize"):
            return None
        # `synchronize` averages; the step would average again unless it skips that.
        wrapped.synchronize()
        skipping = wrapped.skip_synchronize()
        skipping.__enter__()  # left by the function returned below
        return partial(skipping.__exit__, None, None, None)

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        count = tensor.numel() * self.topology.size(group)
        start = partial(hvd.allgather_async, tensor.unsqueeze(0))
        rows: Tensor = self._run("all_gather", group, count, start)
        return rows

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        return self.control.exchange(blob, group)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        if op not in _OPS:
            return super().all_reduce(tensor, op, group)
        start = partial(hvd.allreduce_async_, _widened(tensor), op=_OPS[op])
        total: Tensor = self._run("all_reduce", group, tensor.numel(), start)
        return total.to(tensor.dtype)

    def start_all_reduce(
        self, tensor: Tensor, op: ReduceOp, group: Group | None = None
    ) -> Handle[Tensor] | None:
        if op not in _OPS:
            return None
        start = partial(hvd.allreduce_async_, _widened(tensor), op=_OPS[op])
        started = self._start("all_reduce", group, tensor.numel(), start)
        return started.then(lambda total: total.to(tensor.dtype))

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        start = partial(hvd.broadcast_async_, tensor, src)
        got: Tensor = self._run("broadcast", group, tensor.numel(), start)
        return got

    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        if op is not ReduceOp.SUM:
            return super().reduce_scatter(rows, op, group)
        start = partial(hvd.reducescatter_async, _widened(rows), op=hvd.Sum)
        row: Tensor = self._run("reduce_scatter", group, rows.numel(), start)
        return row.squeeze(0).to(rows.dtype)  # Horovod keeps the dimension that it divides

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        start = partial(hvd.alltoall_async, rows)
        got: Tensor
        got, _sizes = self._run("all_to_all", group, rows.numel(), start)
        return got

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        timeout_s = only_timeout_s("new_group on horovod", options)
        self._n_groups_made += 1
        try:
            made = self._find_process_set(ranks) or hvd.add_process_set(list(ranks))
        except ValueError as error:
            if _DYNAMIC in str(error):
                raise UnsupportedOperation(
                    self.name,
                    f"group {ranks}",
                    f"set {_DYNAMIC}=1 before hvd.init(), or give it "
                    f"process_sets=[hvd.ProcessSet({list(ranks)})]",
                ) from error
            self._fail(f"new_group({list(ranks)})", None, error)
        # Horovod has one process set for these ranks; names keep the operations of groups apart.
        return Group(ranks, made, f"group{self._n_groups_made}", timeout_s)

    def _find_process_set(self, ranks: tuple[int, ...]) -> Any:
        """Return the existing process set of `ranks`: Horovod allows only one."""
        process_sets = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
        for number, members in process_sets.items():
            if tuple(members) == ranks:
                process_set = hvd.ProcessSet(members)
                # As add_process_set would do, which refuses ranks that have a process set.
                process_set.process_set_id = number
                return process_set
        return None

    def adopt_group(self, handle: object) -> Group | None:
        if not isinstance(handle, hvd.ProcessSet) or handle.process_set_id is None:
            return None
        name = f"set{handle.process_set_id}"
        return Group(tuple(handle.ranks), handle, name)

    # Horovod matches operations by name. These names depend only on the group and the kind of call,
    # never on a value, so that mismatched calls raise Horovod's own error, and Horovod's
    # response cache works, which a new name for each call would only fill. Asynchronous calls are
    # numbered.

    def _run(
        self, call: str, group: Group | None, count: int, start: Start, label: str = ""
    ) -> Any:
        """Start an operation and wait for its value. Collective over `group`."""
        return self._finish(*self._begin(call, group, count, start, label))

    def _start(self, call: str, group: Group | None, count: int, start: Start) -> Handle[Any]:
        """Start an operation without waiting for it. Collective over `group`, as `_run` is."""
        name = name_of(group)
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        work = self._begin(call, group, count, start, f".async{number % _ASYNC_NAMES}")
        return Handle(partial(self._finish, *work), partial(_is_done, work[-1]))

    def _begin(
        self, call: str, group: Group | None, count: int, start: Start, label: str
    ) -> tuple[str, str, Group | None, int, int]:
        """Start an operation; return the arguments of `_finish`."""
        if count > _MAX_COUNT:
            raise PayloadError(
                f"{call} of {count} elements over all ranks: Horovod counts in 32 bits, so "
                f"{_MAX_COUNT} is the limit; split the tensor"
            )
        members = hvd.global_process_set if group is None else group.handle
        name = f"unisono.{name_of(group)}{label}"
        key = f"{call}.{name}"
        # Horovod refuses a second operation under a name while the first one is pending.
        earlier = self._under_way.get(key)
        if earlier is not None:  # timed out, interrupted, or not waited for yet
            self._wait(call, group, 0, earlier)
        step = self.control.steps.begin(name_of(group), call)
        try:
            handle = self._under_way[key] = start(name=name, process_set=members)
        except (RuntimeError, ValueError) as error:  # HorovodInternalError is a RuntimeError
            self._fail(call, group, error)
        return key, call, group, step, handle

    def _wait(self, call: str, group: Group | None, step: int, handle: int) -> None:
        check, begin = Wait(self.control, group, call, step), time.monotonic()
        check_at = begin + LOOK_S
        while not _is_done(handle):
            now = time.monotonic()
            if now >= check_at:
                check()
                check_at = now + LOOK_S
            # hvd.synchronize would spin, on a core that Horovod's own thread may need.
            # Each nap is 2 % of the wait so far, so that it delays the call by little.
            time.sleep(min(max((now - begin) / 50, 5e-5), 1e-3))

    def _finish(self, key: str, call: str, group: Group | None, step: int, handle: int) -> Any:
        self._wait(call, group, step, handle)
        if self._under_way.get(key) == handle:  # a later call may have replaced it
            del self._under_way[key]
        try:
            return hvd.synchronize(handle)
        except (RuntimeError, ValueError) as error:
            self._fail(call, group, error)

    def _fail(self, call: str, group: Group | None, error: Exception) -> NoReturn:
        """Raise unisono's error for one of Horovod's."""
        try:
            Wait(self.control, group, call).fail(_ERRORS, error)
        except CollectiveMismatchError as mismatch:
            text = f"{mismatch}; make every rank call the same, with equal shapes and dtypes"
            raise CollectiveMismatchError(text) from error


def _is_done(handle: int) -> bool:
    try:
        return bool(hvd.poll(handle))
    except ValueError:  # another thread has waited for it already
        return True


def _widened(tensor: Tensor) -> Tensor:
    """Return a tensor that Horovod reduces exactly."""
    return tensor.to(torch.int32) if tensor.dtype in _NARROW else tensor


def _initialize(info: RankInfo, timeout_s: float) -> None:
    """Create a context that allows dynamic groups. Collective over all ranks of `info`."""
    if hvd.is_initialized():
        raise AlreadyInitializedError(
            "Horovod is initialised already in this process: use it as it is, or call "
            "hvd.shutdown() first"
        )
    if _is_mpi_finalized():
        raise ContextError(
            "Horovod can't be initialised again in this process: its first context ended MPI too; "
            "import mpi4py.MPI before the first initialize, and MPI lives as long as the process"
        )
    wait_for_all(os.environ, timeout_s)
    if _DYNAMIC in os.environ:
        hvd.init()
    else:
        try:
            hvd.init(process_sets="dynamic")  # Horovod leaves the variable set
        finally:
            os.environ.pop(_DYNAMIC, None)
    if hvd.size() == 1 < info.world_size:
        hvd.shutdown()
        raise ContextError(
            f"rank {info.rank} of {info.world_size} (from {info.source}) found itself alone in "
            "Horovod: start the program with horovodrun or mpirun, or use spawn"
        )


def _is_mpi_finalized() -> bool:
    """Return whether Horovod would abort the process by using a finalized MPI."""
    if not hvd.mpi_built() or os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        return False
    is_over = ctypes.c_int(0)
    hvd.mpi_ops._basics.MPI_LIB_CTYPES.MPI_Finalized(ctypes.byref(is_over))
    return bool(is_over.value)


def _leave(end: Callable[[], None], limit_s: float) -> None:
    """Shut Horovod down within a limit, because its calls wait 30 s for a stopped peer."""
    # After the limit the shutdown continues in its thread, which may delay the exit of the process.
    outcome, thread = SafeFuture.in_thread(end, "unisono-leaving")
    thread.join(limit_s)
    if outcome.is_known:
        outcome.wait()  # raises the error of `end`


def _topology(hint: ContextHint) -> Topology:
    """Return this replica's position, as far as Horovod's context knows it."""
    local_rank = hvd.local_rank()
    node_rank: int | None = hvd.cross_rank()
    nnodes: int | None = hvd.cross_size()
    if local_rank > 0 and not hvd.mpi_ops.is_homogeneous():
        # Horovod's cross numbers count only nodes that have this local rank: all nodes if it is 0.
        info = hint.environment
        is_same = info is not None and (info.rank, info.world_size) == (hvd.rank(), hvd.size())
        node_rank, nnodes = (info.node_rank, info.nnodes) if info and is_same else (None, None)
    if hint.local_rank is not None:
        local_rank = hint.local_rank
    return Topology(hvd.rank(), hvd.size(), local_rank, hvd.local_size(), node_rank, nnodes)


def _device() -> torch.device:
    """Return the device for the local rank."""
    # Only the CPU's branch has run, because no build for GPUs was available.
    is_built = hvd.cuda_built() or hvd.rocm_built()
    if not is_built or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
