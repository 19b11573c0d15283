"""Contract of a computation model: few required members, all others derived from them.

The derived defaults are correct and slow. They are also the specification: the conformance laws
compare each override with its default, for every operation, dtype, root and group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from unisono.errors import UnsupportedOperation
from unisono.model import fallback
from unisono.model.handle import Handle
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.topology import ContextHint, Group, RankInfo, Topology

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ("COMMON_DTYPES", "ComputationModel")


# Supported by the collectives of nearly every library.
COMMON_DTYPES: frozenset[torch.dtype] = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip


class ComputationModel(ABC):
    """Base class of models, each of which is one way for replicas to communicate.

    An instance is one live context of one replica. Tensors passed to it are contiguous, on
    `transport_device`, with a dtype of `dtypes`, without gradient; the model may overwrite and
    return its arguments, because nothing else reads their memory.
    `group` is None for all ranks, else a group that this replica is a member of.
    """

    name: ClassVar[str]
    """The model's name, such as ``"native-dist"``."""
    backends: ClassVar[tuple[str, ...]]
    """Its backends, best first; the attribute is read again at every use."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """Its features beyond the derived members: ``"groups"``, ``"send_recv"``, ``"launch"``."""
    dtypes: frozenset[torch.dtype]
    """Dtypes that its collectives support; every other dtype is emulated with one of these."""
    options: ClassVar[frozenset[str]] = frozenset({"timeout"})
    """Keywords that `initialize` and its launcher take; any other raises at once."""
    replicas_are_threads: ClassVar[bool] = False
    """Whether its replicas are threads, so that no launcher of processes starts them."""
    launcher: ClassVar[str] = "processes"
    """Default launcher of its replicas, unless the model has the capability ``"launch"``."""

    @classmethod
    @abstractmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        """Adopt a live context that was created outside unisono; return None if there is none.

        It must not communicate, so that it returns at once even if only one rank calls it.

        Args:
            hint: facts of the local rank, from the user and the environment.
        """

    @classmethod
    @abstractmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        """Create a context.

        Collective over all ranks of `info`.

        Args:
            backend: one of `backends`.
            info: this replica's rank, and the address of the rendezvous.
            options: those named in the class's `options`; ``timeout`` is a timedelta.

        Raises:
            BackendUnavailableError: the backend can't be used here.
            ContextError: the rendezvous failed.
        """

    @abstractmethod
    def finalize(self) -> None:
        """Destroy a context that `initialize` created; release one that `from_context` adopted.

        Collective over all ranks if the library's own shutdown is; a context that the user has
        already destroyed is not an error.
        """

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """Ranks and nodes, and this replica's position."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that this replica computes on."""

    @property
    def transport_device(self) -> torch.device:
        """The device of tensors that the collectives take."""
        return self.device

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        """Gather one tensor from each rank.

        Collective over `group`.

        Args:
            tensor: [*shape], the same shape and dtype on every rank.
            group: the ranks that take part.

        Returns:
            [n, *shape] in rank order, same dtype and device.

        Raises:
            CollectiveError: a peer failed or timed out.
        """

    # Optional facts and lifecycle

    @classmethod
    def why_unavailable(cls, backend: str) -> str | None:
        """Return why `backend` can't be used here, with the remedy, or None if it can."""
        return None

    @property
    def backend(self) -> str:
        """The backend of this context."""
        return self.backends[0]

    def abort(self) -> None:
        """Close the context without waiting for other ranks, after a failure."""
        return

    def is_alive(self) -> bool:
        """Return whether this context still exists unchanged; called before each use."""
        return True

    # Derived collectives

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        """Gather the bytes of every rank on every rank: the only primitive of the control plane.

        Collective over `group`.

        Args:
            blob: any bytes, of any length, which may differ between ranks.
            group: the ranks that take part.

        Returns:
            The blobs in rank order.

        Raises:
            CollectiveError: a peer failed or timed out.
        """
        return fallback.exchange(self, blob, group)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        """Reduce [*shape] of all ranks to one [*shape] on every rank.

        Collective over `group`. `op` is never AVERAGE, and for floats it is SUM or PRODUCT: the
        facade derives the other reductions from these and from reductions of integers.
        """
        return fold_tensors(op, self.all_gather(tensor, group))

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        """Send the [*shape] of global rank `src` to every rank.

        Collective over `group`. The other ranks pass memory of the same shape.
        """
        return self.all_gather(tensor, group)[self.topology.position(group, src)]

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp, group: Group | None = None
    ) -> Tensor | None:
        """Reduce [*shape] to global rank `dst`; other ranks get None. Collective over `group`."""
        total = self.all_reduce(tensor, op, group)
        return total if self.topology.rank == dst else None

    def scatter(
        self, rows: Tensor | None, into: Tensor, src: int, group: Group | None = None
    ) -> Tensor:
        """Send each rank its row of `rows`, [n, *shape], which is None except on `src`.

        Collective over `group`. `into` is [*shape], memory for the row.
        """
        if rows is None:
            rows = into.new_empty((self.topology.size(group), *into.shape))
        return self.broadcast(rows, src, group)[self.topology.position(group)]

    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        """Reduce [n, *shape] of all ranks and return this rank's row. Collective over `group`."""
        return self.all_reduce(rows, op, group)[self.topology.position(group)]

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        """Send row i of [n, *shape] to the i-th rank, which sends row i of the result.

        Collective over `group`.
        """
        return self.all_gather(rows, group)[:, self.topology.position(group)]

    # Optional members

    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        """Send [*shape] to global rank `dst`, which calls `recv`. Capability ``"send_recv"``.

        Collective over the two ranks.
        """
        raise UnsupportedOperation(self.name, "send", "use a collective such as broadcast")

    def recv(self, into: Tensor, src: int, group: Group | None = None) -> Tensor:
        """Receive a tensor from global rank `src`, of the shape and dtype of `into`.

        Collective over the two ranks.
        """
        raise UnsupportedOperation(self.name, "recv", "use a collective such as broadcast")

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        """Create a group of global ranks in ascending order. Capability ``"groups"``.

        Collective at creation, over all ranks.
        """
        raise UnsupportedOperation(self.name, "groups", "call without `group`")

    def adopt_group(self, handle: object) -> Group | None:
        """Wrap a group object of the model's own library; return None for any other object."""
        return None

    def start_all_reduce(
        self, tensor: Tensor, op: ReduceOp, group: Group | None = None
    ) -> Handle[Tensor] | None:
        """Start `all_reduce` without waiting, or return None if the library has no such call.

        Collective over `group`. For None, the facade runs `all_reduce` in the background.
        """
        return None
