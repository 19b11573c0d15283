"""The contract of a computation model: few required members, the rest derived from them.

The derived defaults are correct and slow. They are also the specification: a model that overrides
one is compared with it, for every operation, dtype, root and group, by the conformance laws.
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


# What nearly every library's collectives carry.
COMMON_DTYPES: frozenset[torch.dtype] = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int32, torch.int64, torch.uint8),
    }
)


class ComputationModel(ABC):
    """One way for replicas to know each other and to communicate.

    An instance is one live context as one replica sees it. Tensors reach it contiguous, on
    `transport_device`, with a dtype out of `dtypes`, without gradient; it may overwrite those
    that it is given and may return them, for the facade hands over memory that nobody else reads.
    `group` is None for all ranks, else a group that this replica is a member of.
    """

    name: ClassVar[str]
    """The model's name, such as ``"native-dist"``."""
    backends: ClassVar[tuple[str, ...]]
    """The backends that belong to it, best first; asked again at every use."""
    capabilities: ClassVar[frozenset[str]] = frozenset()
    """What it can beyond the derived members: ``"groups"``, ``"send_recv"``, ``"launch"``."""
    dtypes: frozenset[torch.dtype]
    """What its collectives carry; every other dtype is emulated by one of these."""
    options: ClassVar[frozenset[str]] = frozenset({"timeout"})
    """Keywords that `initialize` and its launcher take; any other is refused at once."""
    replicas_are_threads: ClassVar[bool] = False
    """Whether its replicas are threads, which no launcher of processes makes."""
    launcher: ClassVar[str] = "processes"
    """Name of what makes its replicas, unless the user names a launcher or it can ``"launch"``."""

    @classmethod
    @abstractmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        """Adopt a live context that somebody else made, or return None.

        It must not communicate: asked on one rank alone it returns at once.

        Args:
            hint: what the user and the environment say of the local rank.
        """

    @classmethod
    @abstractmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        """Make a context.

        Collective over all ranks of `info`.

        Args:
            backend: one of `backends`.
            info: who this replica is, and where the rendezvous is.
            options: those named in the class's `options`; ``timeout`` is a timedelta.

        Raises:
            BackendUnavailableError: the backend can't be used here.
            ContextError: the rendezvous failed.
        """

    @abstractmethod
    def finalize(self) -> None:
        """Destroy what `initialize` made; let go of what `from_context` adopted.

        Collective over all ranks where the library's own end is; a context that the user has
        already destroyed isn't an error.
        """

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """Where this replica stands."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that this replica computes on."""

    @property
    def transport_device(self) -> torch.device:
        """The device that the collectives take tensors on."""
        return self.device

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        """Gather one tensor from each rank.

        Collective over `group`.

        Args:
            tensor: [*shape], the same shape and dtype on every rank.
            group: the ranks that take part.

        Returns:
            [n, *shape] in the order of ranks, same dtype and device.

        Raises:
            CollectiveError: a peer failed or didn't come.
        """

    # What a model may say of itself

    @classmethod
    def why_unavailable(cls, backend: str) -> str | None:
        """Return why `backend` can't be used here and what to do, or None if it can."""
        return None

    @property
    def backend(self) -> str:
        """The backend of this context."""
        return self.backends[0]

    def abort(self) -> None:
        """Leave the context without waiting for other ranks, after a failure."""
        return

    def is_alive(self) -> bool:
        """Return whether this is still the context that it was; called before each use."""
        return True

    # Derived collectives

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        """Gather the bytes of every rank on every rank: the control plane's one primitive.

        Collective over `group`.

        Args:
            blob: any bytes, of any length, which may differ between ranks.
            group: the ranks that take part.

        Returns:
            The blobs in the order of ranks.

        Raises:
            CollectiveError: a peer failed or didn't come.
        """
        return fallback.exchange(self, blob, group)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        """Reduce [*shape] of all ranks to one [*shape] on every rank.

        Collective over `group`. `op` is never AVERAGE, and for floats SUM or PRODUCT: the facade
        makes the others of these and of integers.
        """
        return fold_tensors(op, self.all_gather(tensor, group))

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        """Send the [*shape] of global rank `src` to every rank; others pass memory of its shape.

        Collective over `group`.
        """
        return self.all_gather(tensor, group)[self.topology.position(group, src)]

    def reduce(
        self, tensor: Tensor, dst: int, op: ReduceOp, group: Group | None = None
    ) -> Tensor | None:
        """Reduce [*shape] to global rank `dst`; the others get None. Collective over `group`."""
        total = self.all_reduce(tensor, op, group)
        return total if self.topology.rank == dst else None

    def scatter(
        self, rows: Tensor | None, into: Tensor, src: int, group: Group | None = None
    ) -> Tensor:
        """Send each rank its row of `rows`, [n, *shape], which only `src` has.

        Collective over `group`. `into` is [*shape], memory for the row.
        """
        if rows is None:
            rows = into.new_empty((self.topology.size(group), *into.shape))
        return self.broadcast(rows, src, group)[self.topology.position(group)]

    def reduce_scatter(self, rows: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        """Reduce [n, *shape] of all ranks; each gets its row, [*shape]. Collective over `group`."""
        return self.all_reduce(rows, op, group)[self.topology.position(group)]

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        """Send row i of [n, *shape] to the i-th rank; row i comes from there.

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
        """Receive what global rank `src` sends, of the shape and dtype of `into`.

        Collective over the two ranks.
        """
        raise UnsupportedOperation(self.name, "recv", "use a collective such as broadcast")

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        """Make a group of global ranks in ascending order. Capability ``"groups"``.

        Collective at creation, over all ranks.
        """
        raise UnsupportedOperation(self.name, "groups", "call without `group`")

    def adopt_group(self, handle: object) -> Group | None:
        """Wrap a group object of the model's own library, or None if it is none."""
        return None

    def start_all_reduce(
        self, tensor: Tensor, op: ReduceOp, group: Group | None = None
    ) -> Handle[Tensor] | None:
        """Start `all_reduce` without waiting, or return None where the library has no such way.

        Collective over `group`. After None `all_reduce` is run in the background.
        """
        return None
