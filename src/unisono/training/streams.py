"""Iterable data sets that ranks share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from torch.utils.data import IterableDataset, get_worker_info

from unisono import facts
from unisono.collectives.value_types import T


def shard(iterable: Iterable[T]) -> IterableDataset[T]:
    """Split an iterable over the ranks, and over the workers of their loaders.

    Each reads all of it and keeps what is its own. Of n ranks, rank r has the items r,
    r + n, ..., with any number of workers; it may have one less than others.

    Args:
        iterable: the same items on every rank, such as a stream, or a generator within the
            ``__iter__`` of a dataset; one that is read again for each pass.

    Returns:
        A dataset for `auto_dataloader`, or to be iterated. The rank and the worker are those of the
        process that iterates over it.

    Example:
        >>> import unisono as idist
        >>> list(idist.shard(range(3)))
        [0, 1, 2]
    """
    return Shard(iterable)


class Shard(IterableDataset[T]):
    """What `shard` makes."""

    def __init__(self, dataset: Iterable[T]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[T]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        size = facts.get_world_size()
        return islice(self.dataset, facts.get_rank() + size * index, None, size * count)
