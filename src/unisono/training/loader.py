"""A data loader that feeds the device, and that can go on in the middle of an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from dataclasses import fields, is_dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from unisono.arguments import check_count
from unisono.context import current_model
from unisono.errors import ArgumentError, UnsupportedOperation

__all__ = ("ReplicaLoader", "moved")

_KEYS = ("epoch", "order", "batches", "is_dealt_in_turn", "batch_size", "world_size", "samples")


class ReplicaLoader(DataLoader[Any]):
    """The ``DataLoader`` that `auto_dataloader` makes, with a position that a checkpoint keeps.

    Local.

    Args:
        dataset: as ``DataLoader``'s.
        to_device: where batches go; None leaves them where they are.
        kwargs: as ``DataLoader``'s, for this replica.
    """

    def __init__(self, dataset: Any, to_device: torch.device | None = None, **kwargs: Any) -> None:
        self._target = to_device
        self._world_size = current_model().topology.world_size
        self._epoch = self._order = self._batches = self._left_out = 0
        self._is_resumed = False
        super().__init__(dataset, **kwargs)
        self._epoch = self._order = self._order_of_sampler()

    @property
    def epoch(self) -> int:
        """The epoch that goes on, or comes next; it is one more once an epoch has ended. Local."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; another one than `epoch` begins at its start. Local."""
        check_count("epoch", epoch, 0)
        holder = self._holder()
        if holder is not None:
            holder.set_epoch(epoch)
            self._order = self._order_of_sampler()
        self._go_to(epoch)

    def _go_to(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._batches, self._is_resumed = epoch, 0, False

    def _holder(self) -> Any:
        """Give the sampler that orders by epochs, None where none does. Local."""
        holders = (self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.sampler)
        return next((item for item in holders if hasattr(item, "set_epoch")), None)

    def _order_of_sampler(self) -> int:
        return int(getattr(self._holder(), "epoch", 0))

    @property
    def _index_sampler(self) -> Any:  # torch's loader and its iterators ask for it
        return _Rest(self, super()._index_sampler)

    def __iter__(self) -> Any:
        order = self._order_of_sampler()
        if order != self._order:  # the program has called set_epoch of the sampler itself
            self._order = order
            self._go_to(order)
        if not self._is_resumed:
            self._batches = 0
        self._is_resumed = False
        self._left_out = self._batches
        batches: Iterator[Any] = super().__iter__()
        if isinstance(self.dataset, IterableDataset):
            batches = islice(batches, self._left_out, None)
        for batch in batches:
            self._batches += 1
            yield batch if self._target is None else moved(batch, self._target, self.pin_memory)
        self._epoch, self._batches = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Give the position, for a checkpoint.

        Local. The same on every rank, at the same batch.

        Returns:
            Plain numbers.

        Raises:
            UnsupportedOperation: an epoch is under way, and the sampler can't repeat its order.
        """
        if self._batches and not self._repeats():
            raise UnsupportedOperation(
                current_model().name,
                f"a position within an epoch of a {type(self.sampler).__qualname__}, which draws "
                "another order each time",
                "leave the sampler out, or wrap it in a DistributedProxySampler",
            )
        is_dealt = self._is_dealt_in_turn()
        position = (self._epoch, self._order, self._batches, is_dealt, *self._shape())
        return dict(zip(_KEYS, position, strict=True))

    def _shape(self) -> tuple[int | None, int, int | None]:
        size = None if self.batch_size is None else self.batch_size * self._world_size
        dataset: Any = self.dataset
        return size, self._world_size, len(dataset) if isinstance(dataset, Sized) else None

    def _repeats(self) -> bool:
        holder = self._holder()
        if holder is None:
            inner = getattr(self.batch_sampler, "sampler", self.sampler)
            return isinstance(inner, SequentialSampler) or isinstance(self.dataset, IterableDataset)
        inner = getattr(holder, "sampler", None)
        return getattr(inner, "generator", None) is None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position: the next loop begins with the first batch that wasn't seen.

        Local.

        Args:
            state: from `state_dict`, also of another number of ranks, where the samplers are those
                of `auto_dataloader` and what was seen fills whole batches.

        Raises:
            ArgumentError: it isn't a position, or one in other data or batches.
            UnsupportedOperation: another number of ranks has another order here.
        """
        if not isinstance(state, dict) or set(state) != set(_KEYS):
            raise ArgumentError(f"a position has {', '.join(_KEYS)}: this is {state!r}")
        epoch, order, batches, *shape = (state[key] for key in _KEYS)
        batches = self._batches_here(batches, *shape) if batches else 0
        holder = self._holder()
        if holder is not None:
            holder.set_epoch(order)
        self._order = self._order_of_sampler()
        self._epoch, self._batches, self._is_resumed = epoch, batches, batches > 0

    def _batches_here(
        self,
        batches: int,
        is_dealt_in_turn: bool,
        size: int | None,
        world_size: int,
        samples: int | None,
    ) -> int:
        """Give the number of batches here that are as many samples as `batches` were there."""
        own_size, own_world_size, own_samples = self._shape()
        if samples != own_samples:
            raise ArgumentError(f"the position is in {samples} samples, and here are {own_samples}")
        if (size, world_size) == (own_size, own_world_size):
            return batches
        is_dealt_in_turn = is_dealt_in_turn and self._is_dealt_in_turn()
        if world_size != own_world_size and not is_dealt_in_turn:
            raise UnsupportedOperation(
                current_model().name,
                f"a position of {world_size} ranks on {own_world_size} within an epoch",
                "use the sampler of auto_dataloader, or begin the epoch again with set_epoch",
            )
        if size is None or own_size is None or batches * size % own_size:
            raise ArgumentError(
                f"the position is after {batches} batches of {size} samples of all ranks, which "
                f"aren't whole batches of {own_size}: use the batch size of then"
            )
        return batches * size // own_size

    def _is_dealt_in_turn(self) -> bool:
        """Tell whether the first batches of all ranks are the first samples of one order."""
        kind = type(self.sampler)
        return kind is DistributedSampler or getattr(kind, "deals_in_turn", False)


class _Rest:
    """The batches of indices that come, without those that were left out."""

    def __init__(self, loader: ReplicaLoader, whole: Any) -> None:
        self._loader = loader
        self._whole = whole

    def __iter__(self) -> Iterator[Any]:
        is_drawn_from = not isinstance(self._loader.dataset, IterableDataset)
        return islice(iter(self._whole), self._loader._left_out if is_drawn_from else 0, None)

    def __len__(self) -> int:
        return len(self._whole)


def moved(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move what a batch holds to a device.

    Local.

    Args:
        batch: tensors, what has a ``to`` of its own, and dicts, lists, tuples and dataclasses of
            these; anything else stays.
        device: where to.
        non_blocking: whether copies from pinned memory go on in the background.

    Returns:
        The same where nothing was to be moved; else new containers of the same types.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return batch.to(device)

    def inner(item: Any) -> Any:
        return moved(item, device, non_blocking)

    if isinstance(batch, dict):
        made = copy.copy(batch)
        made.update({key: inner(item) for key, item in batch.items()})
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(inner, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(inner, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in fields(batch) if field.init]
        return replace(batch, **{name: inner(getattr(batch, name)) for name in names})
    return batch
