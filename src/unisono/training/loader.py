"""A data loader that moves batches to the device and can resume within an epoch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from unisono import facts
from unisono.arguments import check_count
from unisono.collectives.call import T
from unisono.context import current_model
from unisono.errors import ArgumentError, UnsupportedOperation
from unisono.payload.pytree import mapped
from unisono.training.randomness import seeded

_KEYS = ("epoch", "order", "batches", "is_dealt_in_turn", "batch_size", "world_size", "samples")


class ReplicaLoader(DataLoader[Any]):
    """The ``DataLoader`` that `auto_dataloader` returns, with a position for checkpoints.

    Args:
        dataset: as ``DataLoader``'s.
        to_device: device that batches are moved to; None leaves them in place.
        kwargs: as ``DataLoader``'s, for this replica.
    """

    sampler: Any  # torch's type lacks set_epoch, which most samplers here have
    generator: torch.Generator | None

    def __init__(self, dataset: Any, to_device: torch.device | None = None, **kwargs: Any) -> None:
        self._target = to_device
        model = current_model()
        self._world_size, self._rank = model.topology.world_size, model.topology.rank
        self._owns_generators = not model.replicas_are_threads  # threads share the generators
        super().__init__(dataset, **kwargs)
        # The outermost sampler with set_epoch passes the epoch on to those within it.
        samplers = (self.batch_sampler, getattr(self.batch_sampler, "sampler", None), self.sampler)
        ordering = (each for each in samplers if hasattr(each, "set_epoch"))
        self._position = _Position(next(ordering, None))
        self._begin = (self._position.order, 0)  # epoch and batch at which training starts
        self._passed = 0  # passes before the first epoch
        self._counts = False  # whether each pass from now on counts as an epoch

    @property
    def epoch(self) -> int:
        """The current or next epoch; it increases when an epoch ends.

        Passes before the first read of `epoch` or call of `set_epoch` don't count as epochs: they
        may compute statistics, or find a learning rate.
        """
        if not self._counts:
            self._passed, self._counts = self._position.order - self._begin[0], True
        return self._position.order - self._passed

    @property
    def start_batch(self) -> int:
        """How many batches a pass of this epoch leaves out, as they were read before a checkpoint.

        To count the batches of an epoch, count from it: ``enumerate(loader, loader.start_batch)``.
        """
        position = self._position
        # A new epoch of the sampler is passed on when the pass begins.
        return position.start if position.epoch_of_sampler == position.epoch_passed_on else 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; a different epoch starts at its first batch.

        Without a call, each pass uses the next epoch's order. The epoch is passed on to the data
        set's ``set_epoch``, if it has one; then even persistent workers restart for each pass.
        """
        check_count("epoch", epoch, 0)
        # The same epoch keeps its position, or the loaded one after passes before training.
        if epoch != self.epoch or self._passed:
            begin, start = self._begin
            self._position.begin(epoch, start if self._passed and epoch == begin else 0)
            self._passed = 0
        self._pass_epoch_on()

    def _pass_epoch_on(self) -> None:
        self._position.set_epoch_of_sampler()
        for dataset in _with_epochs(self.dataset):
            dataset.set_epoch(self._position.order)

    @property
    def _index_sampler(self) -> Any:  # read by torch's loader and its iterators
        batches = super()._index_sampler
        # A stream has no indices to leave out, so `_Batches` leaves out its first batches.
        is_stream = isinstance(self.dataset, IterableDataset)
        return batches if is_stream else _Rest(self._position, batches)

    def __iter__(self) -> Any:
        position = self._position
        epoch = position.epoch_of_sampler
        if epoch != position.epoch_passed_on:  # the program called the sampler's set_epoch
            self.set_epoch(epoch)
        # Begins at the loaded batch, if any, and keeps earlier iterators from moving the position.
        position.begin(position.order, position.start)
        left_out = position.start if isinstance(self.dataset, IterableDataset) else 0
        if _with_epochs(self.dataset):
            self._iterator = None  # persistent workers would keep the old epoch
        batches = super().__iter__()
        return _Batches(batches, position, left_out, self._target, self.pin_memory)

    def _get_iterator(self) -> Any:  # called by torch's loader
        # torch's iterator draws the workers' seed from `generator`, when it is created.
        given, self.generator = self.generator, self._seeds()
        try:
            made: Any = super()._get_iterator()
        finally:
            self.generator = given
        is_split = self._world_size > 1 and not isinstance(self.dataset, IterableDataset)
        # The seeds of workers differ by rank already; fetching in this process needs other ones.
        if is_split and self._owns_generators and self.num_workers == 0:
            made._dataset_fetcher = _Fetcher(made._dataset_fetcher, self._rank)
        return made

    def _seeds(self) -> torch.Generator | None:
        """Return the generator of the workers' seeds, which differ by rank.

        Only a pass that begins at its first batch draws from the program's generator: a resumed
        pass drew from it before the interruption.
        """
        generator: torch.Generator | None = self.generator
        if self._position.start:
            generator = torch.Generator()
            generator.set_state((self.generator or torch.default_generator).get_state())
        if self._rank == 0 or isinstance(self.dataset, IterableDataset):
            return generator  # ranks may shuffle a stream alike, and then take their parts
        return torch.Generator().manual_seed(_draw_seed(generator) + self._rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the position for a checkpoint.

        After the same batch, the position is equal on every rank.

        Returns:
            A dict of plain numbers.

        Raises:
            UnsupportedOperation: an epoch is under way, and the sampler can't repeat its order.
        """
        position = self._position
        if position.batches and not self._order_is_repeatable():
            if self._has_own_batches():
                kind = type(self.batch_sampler)
                remedy = "give it a set_epoch that chooses the order"
            else:
                kind = type(self.sampler)
                remedy = "leave the sampler out, or wrap it in a DistributedProxySampler"
            raise UnsupportedOperation(
                current_model().name,
                f"a position within an epoch of a {kind.__qualname__}, which draws another order "
                "each time",
                remedy,
            )
        return {
            "epoch": position.order - self._passed,
            "order": position.order,
            "batches": position.batches,
            "is_dealt_in_turn": self._is_dealt_in_turn(),
            **self._sizes(),
        }

    def _has_own_batches(self) -> bool:
        return type(self.batch_sampler) not in (BatchSampler, type(None))

    def _sizes(self) -> dict[str, int | None]:
        """Return the batch size over all ranks, and the numbers of ranks and samples."""
        return {
            "batch_size": None if self.batch_size is None else self.batch_size * self._world_size,
            "world_size": self._world_size,
            "samples": len(self.dataset) if isinstance(self.dataset, Sized) else None,
        }

    def _order_is_repeatable(self) -> bool:
        """Return whether the next pass of the same epoch has the same order."""
        sampler = self._position.sampler
        if sampler is None:
            inner = getattr(self.batch_sampler, "sampler", self.sampler)
            is_in_order = isinstance(inner, SequentialSampler) and not self._has_own_batches()
            return is_in_order or isinstance(self.dataset, IterableDataset)
        # The state of a sampler's own generator differs in each pass, unless set_epoch seeds it.
        while getattr(sampler, "generator", None) is None or hasattr(sampler, "set_epoch"):
            if not hasattr(sampler, "sampler"):
                return True
            sampler = sampler.sampler
        return False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position: the next loop begins with the first unseen batch.

        Args:
            state: from `state_dict`; from another number of ranks only with the samplers of
                `auto_dataloader`, and if the samples seen fill whole batches.

        Raises:
            ArgumentError: `state` isn't a position, or belongs to other data or batches.
            UnsupportedOperation: the order differs with the number of ranks.
        """
        _check_position(state)
        epoch, order = state["epoch"], state["order"]
        self._begin = (epoch, self._batches_here(state))
        # As in a new loader, passes before the next use of `epoch` or `set_epoch` don't count.
        self._passed, self._counts = order - epoch, False
        self._position.begin(order, self._begin[1])
        self._pass_epoch_on()

    def _batches_here(self, state: dict[str, Any]) -> int:
        """Convert the number of saved batches to this loader's batches of the same samples."""
        batches: int = state["batches"]
        if not batches:  # at the beginning of an epoch any loader can continue
            return 0
        here = self._sizes()
        if state["samples"] != here["samples"]:
            raise ArgumentError(
                f"the position is for {state['samples']} samples, but the dataset has "
                f"{here['samples']}"
            )
        if here == {key: state[key] for key in here}:
            return batches
        is_dealt_in_turn = state["is_dealt_in_turn"] and self._is_dealt_in_turn()
        if state["world_size"] != here["world_size"] and not is_dealt_in_turn:
            raise UnsupportedOperation(
                current_model().name,
                f"a position of {state['world_size']} ranks on {here['world_size']} within an "
                "epoch",
                "use the sampler of auto_dataloader, or begin the epoch again with set_epoch",
            )
        size, size_here = state["batch_size"], here["batch_size"]
        if size is None or size_here is None or batches * size % size_here:
            raise ArgumentError(
                f"the position is after {batches} batches of {size} samples of all ranks, which "
                f"are not whole batches of {size_here}, the size of all ranks here: use the batch "
                "size it was saved with, and a number of ranks that divides it"
            )
        seen: int = batches * size
        return seen // size_here

    def _is_dealt_in_turn(self) -> bool:
        """Return whether the first batches of all ranks are the first samples of one order."""
        kind = type(self.sampler)
        return kind is DistributedSampler or getattr(kind, "deals_in_turn", False)


def _check_position(state: Any) -> None:
    """Raise unless a state has the keys and types of a position."""
    if not isinstance(state, dict) or set(state) != set(_KEYS):
        raise ArgumentError(f"invalid position {state!r}: expected the keys {', '.join(_KEYS)}")
    for key, value in state.items():
        if key == "is_dealt_in_turn":
            if not isinstance(value, bool):
                raise ArgumentError(f"{key}={value!r} should be a bool")
        # None if the batch size isn't fixed, or the dataset has no length.
        elif value is not None or key not in ("batch_size", "samples"):
            check_count(key, value, 1 if key in ("batch_size", "world_size") else 0)


def _with_epochs(dataset: Any) -> list[Any]:
    """List the data sets with set_epoch: this one, or those within torch's wrappers."""
    if hasattr(dataset, "set_epoch"):
        return [dataset]
    parts: list[Any] = [dataset.dataset] if isinstance(dataset, (Subset, Shard)) else []
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else parts
    return [each for part in parts for each in _with_epochs(part)]


@dataclass(eq=False)
class _Position:
    """A loader's position; iterators refer to it, not to the loader, to avoid a cycle."""

    sampler: Any = None  # the sampler with set_epoch, if any
    start: int = 0  # batches that an iterator of this epoch skips
    batches: int = 0  # batches skipped or seen
    turn: int = 0  # number of the latest iterator, which alone moves the position

    def __post_init__(self) -> None:
        self.order = self.epoch_passed_on = self.epoch_of_sampler  # the epoch whose order is used

    @property
    def epoch_of_sampler(self) -> int:
        """The epoch that the sampler has now."""
        return int(getattr(self.sampler, "epoch", 0))

    def set_epoch_of_sampler(self) -> None:
        """Set the sampler's epoch."""
        if self.sampler is not None:
            self.sampler.set_epoch(self.order)
            self.epoch_passed_on = self.epoch_of_sampler  # read back: it may record no epoch

    def begin(self, order: int, start: int) -> None:
        """Set the position to batch `start` of an epoch, for a new iterator."""
        self.order, self.start, self.batches = order, start, start
        self.turn += 1


@dataclass(eq=False)
class _Batches:
    """Iterator over an epoch's batches on the device; usable after an error, like torch's."""

    inner: Any
    position: _Position
    left_out: int
    target: torch.device | None
    non_blocking: bool

    def __post_init__(self) -> None:
        self._turn = self.position.turn

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self.inner)

    def __next__(self) -> Any:
        position = self.position
        is_new = False  # `_Position.begin` has counted the batches left out
        try:
            while self.left_out:
                self.left_out -= 1
                next(self.inner)
            is_new = True
            batch = next(self.inner)
        except StopIteration:
            if self._turn == position.turn:
                position.begin(position.order + 1, 0)
                position.set_epoch_of_sampler()
            raise
        except Exception:  # raised by the dataset; the next call returns the next batch
            self._count(is_new)
            raise
        self._count(is_new)
        return batch if self.target is None else moved(batch, self.target, self.non_blocking)

    def _count(self, is_new: bool) -> None:
        """Count a new batch, unless a later iterator moves the position."""
        if is_new and self._turn == self.position.turn:
            self.position.batches += 1


@dataclass(eq=False)
class _Fetcher:
    """Fetches batches in this process with global generators seeded by rank."""

    inner: Any
    rank: int

    def fetch(self, indices: Any) -> Any:
        """Fetch the samples of some indices, as torch's fetcher does."""
        with seeded(_draw_seed() + self.rank):
            return self.inner.fetch(indices)


def _draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed, from the global generator if none is given."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


@dataclass(eq=False)
class _Rest:
    """Batches of indices, without those before the start position."""

    position: _Position
    whole: Any

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.whole), self.position.start, None)

    def __len__(self) -> int:
        return len(self.whole)


def moved(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move the tensors of a batch to a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        # The `to` of another class may lack the option non_blocking.
        return batch.to(device)
    if isinstance(batch, (dict, list, tuple)):
        return mapped(batch, lambda item: moved(item, device, non_blocking))
    if not is_dataclass(batch) or isinstance(batch, type):
        return batch
    fields_before = {
        item.name: getattr(batch, item.name) for item in fields(batch) if hasattr(batch, item.name)
    }
    made = {name: moved(value, device, non_blocking) for name, value in fields_before.items()}
    if all(made[name] is fields_before[name] for name in fields_before):
        return batch
    new = copy.copy(batch)
    for name, value in made.items():
        object.__setattr__(new, name, value)  # the dataclass may be frozen
    return new


def shard(iterable: Iterable[T]) -> IterableDataset[T]:
    """Split an iterable over the ranks, and over the workers of their loaders.

    Each worker reads the whole iterable and keeps its part. With n ranks, rank r gets the items r,
    r + n, ..., for any number of workers; a rank may get one item fewer than another.

    Args:
        iterable: yields the same items on every rank, such as a stream, or a generator within the
            ``__iter__`` of a dataset. Each pass iterates over it again.

    Returns:
        A dataset for `auto_dataloader`, or for direct iteration. The rank and the worker are those
        of the iterating process.

    Example:
        >>> import unisono as idist
        >>> list(idist.shard(range(3)))
        [0, 1, 2]
    """
    return Shard(iterable)


class Shard(IterableDataset[T]):
    """The iterable that `shard` returns."""

    def __init__(self, dataset: Iterable[T]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[T]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        size = facts.get_world_size()
        return islice(self.dataset, facts.get_rank() + size * index, None, size * count)
