"""Model of replicas that XLA's runtime starts: threads and processes of torch_xla's launcher.

This module doesn't import torch_xla, so that it can be queried without it; `graph` imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from unisono.arguments import only_timeout_s
from unisono.control.plane import ControlPlane
from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import (
    ArgumentError,
    CollectiveError,
    ContextError,
    UnisonoError,
    UnsupportedOperation,
)
from unisono.model import fallback
from unisono.model.contract import ComputationModel
from unisono.model.fallback import FRAME_BYTES
from unisono.model.launching import LaunchHooks
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.model.training import TrainingHooks
from unisono.models.thread_exchange import ThreadExchange
from unisono.models.xla import setup
from unisono.topology import ContextHint, Group, LaunchPlan, RankInfo, Topology, name_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
REPLICAS = ThreadExchange()
"""Host-side exchange between the replicas of this process before each graph.

A graph that only one replica launches ends the whole process after ten seconds; here a replica
waits up to its timeout. There is one for each process, because an adopted XLA context has no
place for it.
"""
_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "mul",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}
_EVERYWHERE = frozenset({torch.uint8, torch.int32, torch.float32})
_ON_CPU = _EVERYWHERE | {
    torch.bool, torch.int8, torch.int16, torch.int64, torch.float16, torch.float64,
}  # fmt: skip


class _ControlPlane(ControlPlane):
    is_lazy = True
    is_thread_bound = True
    allows_threads = False
    model: XlaModel

    def compares_calls(self, group: Group | None) -> bool:
        return self.model._are_threads and self.model.topology.size(group) > 1

    def bucket(self, size_bytes: int) -> int:
        """Round up to a power of two: XLA compiles a graph for each size."""
        return max(FRAME_BYTES, 1 << (size_bytes - 1).bit_length())

    def settle(self) -> None:
        self.model._graph.cut(str(self.model.device))


class XlaModel(ComputationModel, LaunchHooks, TrainingHooks):
    """Replica of XLA's runtime, a thread or a process."""

    # An instance belongs to one replica; in a process with several replicas each one's thread has
    # its own. Every collective is a separate graph, computed when it returns. Replicas that are
    # threads of one process, as on a CPU, synchronise on the host before each graph, and exchange
    # bytes and create groups there; in a job of several processes all of that needs XLA, whose
    # graphs need every replica, so there are no groups of some of them.
    # On a CPU the collectives take tensors of the host, where the facade can compute exactly what
    # XLA can't. Floats move exactly, but a SUM treats -0.0 as 0.0 and denormals as zero.
    # Tests run on torch_xla 2.9's CPU device. What is for TPU and CUDA, and for jobs of several
    # processes with their exchange over graphs, is written from documentation and not yet run.

    name: ClassVar[str] = "xla-dist"
    backends: ClassVar[tuple[str, ...]] = ("xla-tpu", "xla-cuda", "xla-cpu")
    capabilities: ClassVar[frozenset[str]] = frozenset({"groups"})
    launcher: ClassVar[str] = "xla"
    replicas_are_threads: ClassVar[bool] = True
    averages_in_step: bool = True
    dtypes: frozenset[torch.dtype] = _EVERYWHERE
    topology: Topology = Topology(0, 1)
    device: torch.device = torch.device("cpu")
    transport_device: torch.device = torch.device("cpu")

    def __init__(
        self, graph: Any, topology: Topology, is_owner: bool, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self._graph = graph
        self.topology = topology
        self._is_owner = is_owner
        self._timeout_s = timeout_s
        self._is_live = True
        self._groups_made: dict[tuple[int, ...], int] = {}  # how many of the same ranks
        self._n_replicas = graph.n_replicas()  # compared by `is_alive`
        self.device = graph.device()
        self._are_threads = graph.replicas_are_threads()
        self._kind: str = graph.device_type()
        is_cpu = self._kind == "CPU"
        self.dtypes = _ON_CPU if is_cpu else _EVERYWHERE
        self.transport_device = torch.device("cpu") if is_cpu else self.device
        self.control: ControlPlane = _ControlPlane(self)

    @classmethod
    def why_unavailable(cls, backend: str) -> str | None:
        return setup.why_unusable(backend)

    @classmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        if "torch_xla" not in sys.modules:
            return None
        graph = setup.find_graph()
        topology = None if graph is None else graph.replica()
        if topology is None or REPLICAS.has_left(topology.rank):  # finalized, or failed
            return None
        return cls(graph, topology, False)

    @classmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        graph = setup.load_graph()
        topology = graph.replica()
        n_made = 1 if topology is None else topology.world_size
        if info.world_size not in (1, n_made):  # 1: no launcher has set variables
            raise ContextError(
                f"{backend}: {info.source} reports rank {info.rank} of {info.world_size}, but "
                f"XLA's runtime has {n_made} here: start the replicas with spawn or "
                "torch_xla.launch, or under torchrun call "
                "dist.init_process_group('xla', init_method='xla://') first"
            )
        graph.begin(setup.KINDS[backend])
        topology = topology or graph.replica()  # a single replica is known from now on
        if topology is None:
            raise ContextError(
                f"{backend}: this thread isn't a replica of XLA's runtime: make the call in the "
                "function given to spawn or to torch_xla.launch, and without SPMD"
            )
        REPLICAS.join(topology.rank)
        timeout_s = only_timeout_s(backend, options)
        return cls(graph, topology, True, timeout_s or DEFAULT_TIMEOUT_S)

    def finalize(self) -> None:
        self._is_live = False
        if self._is_owner:
            REPLICAS.leave(self.topology.rank, "has finalized its context")

    def abort(self) -> None:
        REPLICAS.leave(self.topology.rank, "has failed")

    def is_alive(self) -> bool:
        # Replicas that start later take the place of a single replica.
        return self._is_live and self._n_replicas == self._graph.n_replicas()

    @property
    def backend(self) -> str:
        return f"xla-{self._kind.lower()}"

    @classmethod
    def worker_environ(cls, plan: LaunchPlan) -> dict[str, str]:
        backend = plan.backend
        if backend == "xla-cpu" and plan.nnodes > 1:
            raise UnsupportedOperation(
                cls.name,
                f"{backend} on {plan.nnodes} nodes",
                "its replicas are threads of one process; use nnodes=1, or backend 'gloo'",
            )
        return setup.environment(backend, plan)

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        if self.topology.size(group) == 1:
            return [blob]
        if self._are_threads:
            return self._swap("an exchange", blob, group)
        # Across processes, all ranks are the only group with several members.
        return fallback.exchange(self, blob, None, self.control.bucket)

    def wrap_module(self, module: nn.Module, wrapper: str, **options: Any) -> nn.Module | None:
        if wrapper != "ddp":
            return None
        # The step averages the gradients, as backward only records a graph, and may run in a
        # thread of autograd's, which isn't a replica. So the module itself needs no wrapper.
        with torch.no_grad():
            for item in (*module.parameters(), *module.buffers()):
                mine = item.detach().to(self.transport_device).contiguous()
                item.copy_(self.broadcast(mine, 0).to(item.device))
        return module

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        n = self.topology.size(group)
        if n == 1:
            return tensor.unsqueeze(0)
        if tensor.numel() == 0:  # XLA fails on empty tensors
            return tensor.new_empty((n, *tensor.shape))
        if not self._is_everybody(group):
            part = tensor.to("cpu", copy=True)  # other threads read it later
            parts = self._swap(_describe("all_gather", tensor), part, group)
            return torch.stack(parts).to(self.transport_device)
        return self._run("all_gather", tensor, self._graph.all_gather)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        if not self._is_native(tensor, op, group):
            return fold_tensors(op, self.all_gather(tensor, group).cpu()).to(self.transport_device)
        build = partial(self._graph.all_reduce, kind=_REDUCTIONS[op])
        return self._run(f"all_reduce {op.name}", tensor, build)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        if not self._is_native(tensor, ReduceOp.SUM, group):
            return super().broadcast(tensor, src, group)
        # The other ranks add zeros, to the bits as integers. This is exact for any dtype, and takes
        # n times less memory than all_gather.
        if self.topology.rank != src:
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        build = partial(self._graph.all_reduce, kind="sum", as_bits=True)
        return self._run(f"broadcast from {src}", tensor, build)

    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        if not self._is_native(rows, op, group):
            return super().reduce_scatter(rows, op, group)
        build = partial(self._graph.reduce_scatter, kind=_REDUCTIONS[op])
        return self._run(f"reduce_scatter {op.name}", rows, build)

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        if not self._is_native(rows, ReduceOp.SUM, group):
            return super().all_to_all(rows, group)
        return self._run("all_to_all", rows, self._graph.all_to_all)

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        if options:
            raise ArgumentError(f"groups of XLA take no options: {', '.join(sorted(options))}")
        if not self._are_threads and 1 < len(ranks) < self.topology.world_size:
            raise UnsupportedOperation(
                self.name,
                f"group {ranks} of {self.topology.world_size} replicas in several processes",
                "XLA's graphs need every replica; use all ranks, or backend 'nccl' or 'gloo'",
            )
        # The count gives each group of the same ranks its own rounds.
        count = self._groups_made[ranks] = self._groups_made.get(ranks, 0) + 1
        return Group(ranks, name=f"{ranks} {count}")

    def _is_everybody(self, group: Group | None) -> bool:
        return self.topology.size(group) == self.topology.world_size

    def _is_native(self, tensor: Tensor, op: ReduceOp, group: Group | None) -> bool:
        """Return whether XLA itself computes this operation."""
        return (
            op in _REDUCTIONS
            and tensor.numel() > 0
            and self.topology.world_size > 1
            and self._is_everybody(group)
        )

    def _run(self, call: str, tensor: Tensor, build: Callable[[Tensor], Tensor]) -> Tensor:
        what = _describe(call, tensor)

        def wait_for_all() -> None:
            if self._are_threads:
                self._swap(what, None, None)

        try:
            result: Tensor = self._graph.run(tensor.to(self.device), build, wait_for_all)
            return result.to(self.transport_device)
        except UnisonoError:  # it may be a RuntimeError, too
            raise
        except (RuntimeError, ValueError) as error:
            where = f"{what} on rank {self.topology.rank}"
            raise CollectiveError(f"XLA failed in {where}: {error}") from error

    def _swap(self, call: str, item: T, group: Group | None) -> list[T]:
        ranks, rank = self.topology.members(group), self.topology.rank
        return REPLICAS.swap(name_of(group), ranks, rank, call, item, self._timeout_s)


def _describe(call: str, tensor: Tensor) -> str:
    return f"{call} {tensor.dtype} {list(tensor.shape)}"
