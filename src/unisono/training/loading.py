"""Data loaders and samplers that split a dataset among replicas."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import warnings
from collections.abc import Iterator, Sequence, Sized
from itertools import cycle, islice
from typing import Any, ClassVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from unisono import facts
from unisono.collectives.call import exchange_blobs, introduce
from unisono.context import communicator, current, current_model
from unisono.control.signatures import level
from unisono.errors import ArgumentError, CollectiveMismatchError
from unisono.model.training import hooks_of
from unisono.training.loader import ReplicaLoader, Shard
from unisono.training.randomness import seeded

_log = logging.getLogger(__name__)
_OF_TORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_drawing = threading.Lock()


def auto_dataloader(
    dataset: Dataset[Any] | Sequence[Any] | DataLoader[Any],
    *,
    per_replica: bool = False,
    to_device: bool = True,
    **kwargs: Any,
) -> ReplicaLoader:
    """Create a data loader that splits the dataset and ``batch_size`` among replicas.

    Collective over all ranks, at the first such call, in a context created outside unisono; else
    local.

    ``batch_size`` is that of all replicas together and is divided by their number; ``num_workers``
    is that of a node and is divided among its replicas.

    Without ``sampler`` the loader shuffles, unless ``shuffle=False``. Each pass has another order;
    the orders are the same on every run, for any number of replicas. ``loader.set_epoch(epoch)``
    chooses one of them. The seed of a ``generator``, the same on every rank, gives other orders.
    With several replicas, a sampler that isn't distributed is wrapped in a
    `DistributedProxySampler`, and whole batches of a batch sampler go to the replicas in turn.

    Random draws of a map-style dataset differ by rank, if replicas are processes. Memory is pinned
    where that helps the device.

    Args:
        dataset: the same on every rank, a list for example; an iterable one must yield only
            this rank's part, as `shard` does. From a ``DataLoader`` a new loader is made: the
            arguments of the old one are used where `kwargs` has none; torch's ``BatchSampler``
            counts as its size, order and ``drop_last``. The batch size and the workers of a
            `ReplicaLoader`, and of a loader with a distributed sampler, are one rank's already;
            they stay as they are, where `kwargs` has none.
        per_replica: whether ``batch_size`` and ``num_workers`` are those of each replica.
        to_device: whether batches are moved to `device`, from pinned memory in the background.
        kwargs: arguments of ``DataLoader``.

    Returns:
        A `ReplicaLoader`, which is a ``DataLoader`` with a position for checkpoints; or the
        model's own loader.

    Raises:
        ArgumentError: ``batch_size`` isn't an int of at least 1, or the ``DataLoader`` is of a
            derived class.

    Example:
        >>> import unisono as idist
        >>> loader = idist.auto_dataloader([1, 2, 3], batch_size=2, shuffle=False)
        >>> [batch.tolist() for batch in loader]
        [[1, 2], [3]]
    """
    context = current()
    hooks, world_size = hooks_of(context.model), context.model.topology.world_size
    if isinstance(dataset, DataLoader):
        dataset, kwargs = _dataset_and_arguments(dataset, kwargs, 1 if per_replica else world_size)
    batch_size = kwargs.get("batch_size", 1)
    is_count = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0
    if batch_size is not None and not is_count:
        raise ArgumentError(f"batch_size={batch_size!r} should be an int of at least 1, or None")
    if world_size > 1:
        introduce(context, "auto_dataloader")  # so that the number of ranks on this node is known
        if not per_replica:
            # Only a given size is divided, not the default of 1.
            if kwargs.get("batch_size") is not None:
                kwargs["batch_size"] = _share(batch_size, world_size)
            n_local, workers = facts.get_nproc_per_node(), kwargs.get("num_workers", 0)
            # A number of workers below that of ranks isn't divided, as in ignite.distributed.
            if workers >= n_local:
                kwargs["num_workers"] = math.ceil(workers / n_local)
    _set_sampler(dataset, kwargs, world_size)
    kwargs.setdefault("pin_memory", hooks.can_pin_memory)
    device = context.model.device if to_device and context.model.device.type != "cpu" else None
    loader: ReplicaLoader = hooks.wrap_loader(ReplicaLoader(dataset, device, **kwargs))
    return loader


_COPIED = (
    "num_workers", "collate_fn", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers",
)  # fmt: skip


def _dataset_and_arguments(
    loader: DataLoader[Any], given: dict[str, Any], world_size: int
) -> tuple[Any, dict[str, Any]]:
    """Return a loader's dataset and arguments, with counts that `world_size` will divide again."""
    if type(loader) not in (DataLoader, ReplicaLoader):
        raise ArgumentError(
            f"cannot recreate a {type(loader).__qualname__} for this rank: pass the dataset, or a "
            "torch DataLoader"
        )
    kwargs: dict[str, Any] = {name: getattr(loader, name) for name in _COPIED}
    kwargs["in_order"] = getattr(loader, "in_order", True)
    # False may be DataLoader's default, so the device decides instead.
    if loader.pin_memory:
        kwargs["pin_memory"] = True
    kwargs |= _batches_of(loader)
    # A ReplicaLoader of a stream has no distributed sampler.
    is_divided = type(loader) is ReplicaLoader or _shares(loader) or _shares(loader.batch_sampler)
    if is_divided and world_size > 1:
        kwargs["num_workers"] *= facts.get_nproc_per_node()
        if kwargs.get("batch_size") is not None:
            kwargs["batch_size"] *= world_size
    orders = {"sampler", "shuffle", "batch_sampler"}
    dropped = orders if given.keys() & orders else set()
    # DataLoader rejects these options beside a batch sampler.
    if given.get("batch_sampler") is not None:
        dropped = dropped | {"batch_size", "drop_last"}
    kept = {name: value for name, value in kwargs.items() if name not in dropped}
    return loader.dataset, {**kept, **given}


def _batches_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that define a loader's batches."""
    batches: Any = loader.batch_sampler
    is_of_torch = type(batches) is BatchSampler
    # From a batch_size, DataLoader makes torch's own batch sampler; any other one was given.
    is_given = batches is not None and (loader.batch_size is None or not is_of_torch)
    if is_given and not (is_of_torch and isinstance(batches.sampler, Sampler)):
        return {"batch_sampler": batches}
    # The loader's batch_size, drop_last and sampler aren't used beside a given batch sampler.
    source: Any = batches if is_given else loader
    made = {"batch_size": source.batch_size, "drop_last": source.drop_last}
    is_iterable = isinstance(loader.dataset, IterableDataset)
    return made if is_iterable else {**made, **_order_of(source.sampler)}


def _order_of(sampler: Any) -> dict[str, Any]:
    """Return the arguments that define a loader's sampler."""
    if type(sampler) is SequentialSampler:
        return {"shuffle": False}
    if type(sampler) is RandomSampler:
        draws_all = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        if draws_all and sampler.generator is None:
            return {"shuffle": True}
    return {"sampler": sampler}


def _set_sampler(dataset: Any, kwargs: dict[str, Any], world_size: int) -> None:
    """Set in `kwargs` a sampler that splits the samples among replicas."""
    if kwargs.get("batch_sampler") is not None:
        if world_size > 1:
            kwargs["batch_sampler"] = _own_batches(kwargs["batch_sampler"], world_size)
    elif isinstance(dataset, IterableDataset):
        if world_size > 1 and facts.is_main_process() and not isinstance(dataset, Shard):
            _log.warning(
                "auto_dataloader: a %s is iterable, so every rank reads all of it, unless its "
                "__iter__ takes a part: idist.shard(dataset) gives each rank and worker its own",
                type(dataset).__qualname__,
            )
    else:
        kwargs["sampler"] = _sampler(dataset, kwargs)


def _share(batch_size: int, world_size: int) -> int:
    """Return the batch size of each replica; warn if these don't add up to `batch_size`."""
    # As in ignite.distributed, a size below the number of replicas isn't divided.
    share = batch_size // world_size if batch_size >= world_size else batch_size
    if share * world_size != batch_size:
        warnings.warn(
            f"batch_size={batch_size} can't be divided among {world_size} replicas: each loads "
            f"batches of {share}, {share * world_size} together",
            UserWarning,
            stacklevel=level(),
        )
    return share


def _own_batches(batch_sampler: Any, world_size: int) -> Any:
    """Return a batch sampler of this rank's batches; warn if the given one can't be split."""
    shares = _shares(batch_sampler)
    if world_size in shares:
        return batch_sampler
    if not shares and hasattr(batch_sampler, "__len__"):
        return _DealtInTurn(batch_sampler)
    what = f"is distributed over {shares[0]} replicas" if shares else "has no length"
    warnings.warn(
        f"the batch_sampler, a {type(batch_sampler).__qualname__}, {what}, so its batches aren't "
        f"dealt to the {world_size} replicas, and each would load all of them: give it a __len__, "
        "or a sampler for these replicas",
        UserWarning,
        stacklevel=level(),
    )
    return batch_sampler


def _shares(batches: Any) -> list[int]:
    """Return the numbers of replicas over which a batch sampler and its sampler are distributed."""
    samplers: tuple[Any, Any] = batches, getattr(batches, "sampler", None)
    return [each.num_replicas for each in samplers if hasattr(each, "num_replicas")]


def _sampler(dataset: Any, kwargs: dict[str, Any]) -> Any:
    """Return a sampler of this rank's samples; a given one that isn't distributed is wrapped."""
    topology = current_model().topology
    share = topology.world_size, topology.rank
    sampler = kwargs.get("sampler")
    if sampler is None:
        is_shuffled = kwargs.pop("shuffle", True)  # DataLoader rejects it beside a sampler
        generator: torch.Generator | None = kwargs.get("generator")
        # Below 2**62, as the epoch is added.
        seed = 0 if generator is None else generator.initial_seed() % (1 << 62)
        if topology.world_size == 1:
            # The same order as with any number of replicas, in which a position can be resumed.
            return _Shuffled(dataset, seed) if is_shuffled else _InOrder(dataset)
        return DistributedSampler(dataset, *share, shuffle=is_shuffled, seed=seed)
    sampler_share = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    if sampler_share == (None, None):
        if topology.world_size == 1:
            return sampler
        proxy = DistributedProxySampler if isinstance(sampler, Sampler) else _DealtInTurn
        return proxy(sampler, *share)
    if sampler_share != share:
        warnings.warn(
            f"the sampler is for rank {sampler_share[1]} of {sampler_share[0]}, but this is rank "
            f"{topology.rank} of {topology.world_size}",
            UserWarning,
            stacklevel=level(),
        )
    return sampler


class _Shuffled(RandomSampler):
    """The order of a ``DistributedSampler`` for one replica."""

    # Derived from the type of sampler that ignite.distributed's loaders have with one replica.
    epoch = 0
    deals_in_turn = True

    def __init__(self, dataset: Sized, seed: int) -> None:
        super().__init__(dataset)
        self._indices: Any = DistributedSampler(dataset, 1, 0, seed=seed)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch."""
        self.epoch = epoch
        self._indices.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


class _InOrder(SequentialSampler):
    """The order of the dataset, with a set_epoch that loaders can call."""

    # Not a DistributedSampler, which couldn't be split again, and lists all indices.
    epoch = 0
    deals_in_turn = True

    def set_epoch(self, epoch: int) -> None:
        """Record the epoch, as a distributed sampler does."""
        self.epoch = epoch


class DistributedProxySampler(DistributedSampler[Any]):
    """Wraps any sampler with a length, and distributes its indices to the replicas in turn.

    Every rank draws all indices of the sampler, with the generators of torch, Python and numpy
    seeded by the epoch, and keeps its part; the generators are restored. When an epoch begins,
    ranks compare their draws, which is collective over all ranks, unless the sampler is torch's own
    and has no generator. Like torch's ``DistributedSampler``, it starts over at the end until all
    ranks have equally many. A loader of `auto_dataloader` sets each epoch; with another loader call
    ``set_epoch``, which is passed on to a sampler that has it.

    Args:
        sampler: any ``Sampler`` with a length that isn't distributed.
        num_replicas: number of replicas; None for the job's.
        rank: this replica's rank; None for the rank in the job.

    Raises:
        ArgumentError: `sampler` isn't such a sampler.
    """

    deals_in_turn = True
    num_samples: int
    total_size: int
    _sampler_type: ClassVar[type] = Sampler

    def __init__(
        self, sampler: Sampler[Any], num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        if not isinstance(sampler, self._sampler_type):
            raise ArgumentError(f"a Sampler is needed, not a {type(sampler).__qualname__}")
        if isinstance(sampler, DistributedSampler):
            raise ArgumentError("the sampler is distributed already: use it as it is")
        if not hasattr(sampler, "__len__"):
            raise ArgumentError(f"the sampler, a {type(sampler).__qualname__}, has no length")
        topology = current_model().topology
        super().__init__(
            sampler,  # type: ignore[arg-type]  # in place of a dataset: only its length is read
            num_replicas=topology.world_size if num_replicas is None else num_replicas,
            rank=topology.rank if rank is None else rank,
            shuffle=False,
        )
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        with _drawing, seeded(self.epoch):  # replicas that are threads share the generators
            indices = list(self.sampler)  # the number of indices may differ by epoch
            if not indices:
                raise ArgumentError("the sampler has a length, but yields no indices")
            self.num_samples = math.ceil(len(indices) / self.num_replicas)
            self.total_size = self.num_samples * self.num_replicas
        # torch's own samplers draw from the generators seeded above, and so alike on every rank.
        if type(self.sampler) not in _OF_TORCH or getattr(self.sampler, "generator", None):
            self._compare(indices)
        return islice(cycle(indices), self.rank, self.total_size, self.num_replicas)

    def _compare(self, indices: list[Any]) -> None:
        """Raise on all ranks if their draws differ, as their parts would overlap."""
        context = communicator()
        if context.model.topology.world_size != self.num_replicas:
            return  # the replicas aren't this job's ranks
        digest = hashlib.blake2b(repr(indices).encode(), digest_size=16).digest()
        name = type(self.sampler).__qualname__
        if len(set(exchange_blobs(context, f"an epoch of a {name}", digest, None))) > 1:
            raise CollectiveMismatchError(
                f"the sampler, a {name}, draws other indices on other ranks, so their parts would "
                "overlap and leave samples out: use torch's default generator, or give "
                "the sampler's generator the same seed on every rank"
            )


class _DealtInTurn(DistributedProxySampler):
    """Distributes the indices or batches of any iterable with a length."""

    _sampler_type = object
