"""Model of a single replica: world size 1, with the same semantics as any other world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unisono.accelerators import current_device
from unisono.arguments import check_names
from unisono.errors import ArgumentError, WorkerFailedError
from unisono.model.contract import COMMON_DTYPES, ComputationModel
from unisono.model.launching import LaunchHooks
from unisono.topology import ContextHint, Group, LaunchPlan, RankInfo, Topology

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
# Options of other models, so that a program written for many ranks runs unchanged on one.
_GROUP_OPTIONS = ("timeout", "backend", "pg_options", "group_desc", "use_local_synchronization")
_ALONE = Topology(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nnodes=1)


class SerialModel(ComputationModel, LaunchHooks):
    """The default model, active while no context exists."""

    name: ClassVar[str] = "serial"
    backends: ClassVar[tuple[str, ...]] = ("serial",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"groups", "launch", "send_recv"})
    dtypes: frozenset[torch.dtype] = COMMON_DTYPES
    topology: Topology = _ALONE
    transport_device: torch.device = torch.device("cpu")

    def __init__(self) -> None:
        self._n_groups = 0

    @classmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        return None

    @classmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        return cls()

    @classmethod
    def launch(cls, entry: Callable[[Self], T], plan: LaunchPlan, **options: Any) -> list[T]:
        if plan.world_size != 1:
            raise ArgumentError(
                f"the serial model is one replica, not nproc_per_node={plan.nproc_per_node}: use "
                "'threads', or a backend such as 'gloo'"
            )
        try:
            return [entry(cls())]
        except Exception as error:
            raise WorkerFailedError.of(error, 0, 1) from error

    def finalize(self) -> None:
        return

    @property
    def device(self) -> torch.device:
        return current_device()

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        return tensor.unsqueeze(0)

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        return [blob]

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        check_names("new_group", options, _GROUP_OPTIONS)
        self._n_groups += 1
        return Group(ranks, name=f"group {self._n_groups}")


class ChildOfRank(SerialModel):
    """Model in a process that a rank started, such as a DataLoader worker."""

    # It is serial, but has the topology, the backend and the device of that rank.

    def __init__(self, topology: Topology, name: str, backend: str, device: str) -> None:
        super().__init__()
        self.name = name  # type: ignore[misc]
        self.topology = topology
        self._backend, self._device = backend, torch.device(device)

    @property
    def backend(self) -> str:
        return self._backend

    @property
    def device(self) -> torch.device:
        return self._device
