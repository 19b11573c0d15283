"""A module that trains data-parallel on any model that has an all_reduce."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono._context import communicator
from unisono.collectives._rounds import swap
from unisono.errors import ArgumentError, PayloadError, UnsupportedOperation
from unisono.training._averager import Averager
from unisono.training._flat import MEGABYTE
from unisono.training.averaging import broadcast_params

__all__ = ("Replicated", "owners")

_JOIN = "a step of join"
_SYNCS, _ACCUMULATES, _HAS_ENDED = b"s", b"a", b"e"
# DistributedDataParallel's, which are always so here, or make no difference.
_NEEDLESS = frozenset(
    {"find_unused_parameters", "gradient_as_bucket_view", "static_graph", "check_reduction"}
)
_alive: weakref.WeakSet[Replicated] = weakref.WeakSet()


class Replicated(nn.Module):
    """What `auto_model` makes where a model's library has no wrapper of its own.

    Collective at creation, over all ranks: parameters and buffers become those of rank 0. Gradients
    have the mean of all ranks when backward returns; each bucket of them travels as soon as it is
    complete, while backward goes on. Each backward must reach some parameter on every rank.

    Args:
        module: the module; stays reachable as ``.module``.
        bucket_cap_mb: MiB of gradients that travel together.
        broadcast_buffers: whether buffers become those of rank 0 before each forward in training.
        options: those of ``DistributedDataParallel`` that are needless here.

    Raises:
        CollectiveMismatchError: the modules differ between ranks; names where (on every rank).
        PayloadError: an embedding has sparse gradients.
        UnsupportedOperation: an option of ``DistributedDataParallel`` that this doesn't have.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        foreign = sorted(set(options) - _NEEDLESS)
        if foreign:
            raise UnsupportedOperation(
                communicator().name, f"option {', '.join(foreign)} of auto_model", "leave it out"
            )
        size_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        if not size_mb > 0:
            raise ArgumentError(f"bucket_cap_mb={bucket_cap_mb!r} should be over 0")
        sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False)]
        if sparse:
            raise PayloadError(
                f"{', '.join(sparse)} has sparse gradients, which are averaged dense: "
                "use sparse=False"
            )
        broadcast_params(module)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._averager = Averager(module, int(size_mb * MEGABYTE))
        self._is_joining = False
        self._leader = 0
        _alive.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over all ranks in training, where it has buffers."""
        if torch.is_grad_enabled() and self.training:
            self._averager.check_context()
            self._averager.reset()
            src = 0
            if self._is_joining:
                word = _SYNCS if self._averager.is_syncing else _ACCUMULATES
                src = self._first_active(swap(communicator(), _JOIN, word, None))
            if self._averager.is_syncing:
                self._broadcast_buffers(src)
        return self.module(*args, **kwargs)

    def _first_active(self, said: list[bytes]) -> int:
        """Note which rank is the first that goes on, whose values all have in the end. Local."""
        self._leader = next(rank for rank, word in enumerate(said) if word != _HAS_ENDED)
        return self._leader

    def _broadcast_buffers(self, src: int) -> None:
        buffers = list(self.module.buffers()) if self.broadcast_buffers else []
        if buffers:
            broadcast_params(buffers, src)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of this rank add up, for the first backward outside to average.

        Local.
        """
        before = self._averager.is_syncing
        self._averager.is_syncing = False
        try:
            yield
        finally:
            self._averager.is_syncing = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have different numbers of batches: who ends first goes along with zeros.

        Collective over all ranks, which enter and leave together. Each forward within is followed
        by its backward. At the end all have the parameters and buffers of the rank that went on
        longest. Layers with collectives of their own, such as synchronised batch norm, don't fit.
        """
        self._is_joining = True
        try:
            yield
        finally:
            self._is_joining = False
        while True:
            said = swap(communicator(), _JOIN, _HAS_ENDED, None)
            if all(word == _HAS_ENDED for word in said):
                break
            src = self._first_active(said)
            if said[src] == _SYNCS:
                self._broadcast_buffers(src)
                self._averager.shadow()
        broadcast_params(self.module, self._leader)

    def release(self) -> None:
        """Stop averaging gradients: an optimizer does instead. Local."""
        self._averager.release()

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentError(
            "a model that auto_model wrapped belongs to its context and can't be copied or "
            "pickled: use its .module"
        )


def owners(parameters: Iterable[nn.Parameter]) -> list[Replicated]:
    """List the wrappers of the active context that average one of these parameters. Local."""
    keys = {id(parameter) for parameter in parameters}
    averagers = [(each, each._averager) for each in list(_alive)]
    return [each for each, it in averagers if it.parameter_ids & keys and it.is_current]
