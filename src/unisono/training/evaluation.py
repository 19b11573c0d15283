"""Distributed evaluation of every sample exactly once, in the order of the dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from unisono.arguments import check_count
from unisono.collectives.call import T
from unisono.collectives.gathers import all_gather, gather
from unisono.collectives.membership import check_rank
from unisono.collectives.outcomes import together
from unisono.context import communicator, current, current_model
from unisono.errors import ArgumentError, CollectiveMismatchError
from unisono.training.loading import DistributedProxySampler, auto_dataloader

Columns = dict[str | None, Any]
Kind = tuple[str, tuple[int, ...]] | None  # dtype and shape of a sample's result; None for lists


class EvaluationSampler(Sampler[int]):
    """Distributes samples in turn, each to one rank, without padding and without shuffling.

    Ranks may get one sample more than others, or none, so call no collective within the loop
    over them; `gather_results` puts the results in order.

    Args:
        dataset: anything with a length, the same on every rank.
        num_replicas: number of replicas; None for the job's.
        rank: this replica's rank; None for the rank in the job.

    Raises:
        ArgumentError: `rank` isn't below `num_replicas`.
    """

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None
    ) -> None:
        topology = current_model().topology
        size = topology.world_size
        count = size if num_replicas is None else num_replicas
        self.num_replicas: int = check_count("num_replicas", count)
        self.rank: int = check_count("rank", topology.rank if rank is None else rank, 0)
        if self.rank >= self.num_replicas:
            raise ArgumentError(f"rank={self.rank} should be below {self.num_replicas}")
        self._indices = range(self.rank, len(dataset), self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def set_epoch(self, epoch: int) -> None:
        """Accept the epoch, without effect, as loops may set it on any sampler."""


@overload
def gather_results(part: Tensor, size: int) -> Tensor: ...


@overload
def gather_results(part: list[T] | tuple[T, ...], size: int) -> list[T]: ...


@overload
def gather_results(
    part: list[Any] | tuple[Any, ...] | Tensor, size: int, dst: int | None = None
) -> Any: ...


def gather_results(part: Sequence[Any] | Tensor, size: int, dst: int | None = None) -> Any:
    """Gather the results of all ranks in the order of the dataset.

    Collective over all ranks.

    Args:
        part: this rank's results, one for each sample that it had, in order: those of an
            `EvaluationSampler`, or of a ``DistributedSampler`` that doesn't shuffle, whose
            repeated samples are left out. A list or tuple of anything, None included; or a tensor
            [k, ...] on every rank.
        size: samples in the dataset.
        dst: global rank that gets them; None for all.

    Returns:
        A list of `size` results, or a tensor [size, ...]; None on ranks other than `dst`.

    Raises:
        ArgumentError: `part` isn't a list, tuple or tensor, or `dst` isn't a rank.
        CollectiveMismatchError: a rank has fewer results than it had samples, or results that
            differ in kind, dtype or shape from those of others (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.gather_results(["a", None, "c"], size=3)
        ['a', None, 'c']
    """
    if not isinstance(part, (list, tuple, Tensor)):
        raise ArgumentError(f"results should be a list or a tensor, not {type(part).__qualname__}")
    size = check_count("size", size, 0)
    context = current()
    n = context.model.topology.world_size
    mine = part if isinstance(part, Tensor) else list(part)
    parts: Any
    if dst is None:
        parts = all_gather(mine, uneven=True)
        described = [(len(item), _kind(item)) for item in parts]
    else:
        check_rank(context, None, dst, "dst")
        # Within lists, as `gather` would join tensors, which needs one shape.
        lists = gather([mine], dst=dst)
        parts = None if lists is None else [item for (item,) in lists]
        # All ranks need the counts, so that they raise together.
        described = all_gather((len(mine), _kind(mine)))
    counts = [count for count, _ in described]
    short = [rank for rank in range(n) if counts[rank] < len(range(rank, size, n))]
    if short:
        raise CollectiveMismatchError(
            f"gather_results of {size} over {n} ranks: ranks {short} have too few: counts by rank "
            f"are {counts}; rank r needs one result for samples r, r + {n}, ... below {size}"
        )
    _check_alike(described)
    if parts is None:
        return None
    if isinstance(part, Tensor):
        return _interleaved(parts, size)
    return [parts[i % n][i // n] for i in range(size)]


def _kind(part: Sequence[Any] | Tensor) -> Kind:
    """Return the dtype and shape of a sample's result in a tensor, None for a list."""
    return (str(part.dtype), tuple(part.shape[1:])) if isinstance(part, Tensor) else None


def _check_alike(described: Sequence[tuple[int, Kind]]) -> None:
    """Check that all ranks have lists, or tensors that can be joined."""
    all_kinds = {kind for _, kind in described}
    kinds = {kind for count, kind in described if count}  # an empty tensor may be of any kind
    # A list and a tensor can't be joined even if one of them is empty.
    if len(kinds) > 1 or (None in all_kinds and len(all_kinds) > 1):
        shown = "; ".join(
            f"rank {rank}: {'a list' if kind is None else f'{kind[0][6:]}[{count}, *{kind[1]}]'}"
            for rank, (count, kind) in enumerate(described)
        )
        raise CollectiveMismatchError(f"gather_results of different dtypes or shapes: {shown}")


def _interleaved(parts: Sequence[Tensor], size: int) -> Tensor:
    """Merge the tensors [k, ...] of n ranks; rank r has the samples r, r + n, ..."""
    like = next((item for item in parts if len(item)), parts[0])
    joined = like.new_empty((size, *like.shape[1:]))
    for rank, item in enumerate(parts):
        target = joined[rank :: len(parts)]
        if len(target):
            target.copy_(item[: len(target)])  # without samples repeated as padding
    return joined


def evaluate(fn: Callable[[Any], Any], data: Any, dst: int | None = None, **kwargs: Any) -> Any:
    """Run a function on each sample of a dataset once, on all ranks together.

    Collective over all ranks. Each rank gets its part of the samples. All ranks call `fn` equally
    often, so that it may call collectives, as a sharded model does; a rank that has fewer samples
    computes one again, whose result is left out. If `fn` raises on one rank, ranks that wait for it
    in the facade's collectives raise, too; in torch's own collectives they wait until the deadline.

    Args:
        fn: called with a batch, on this rank's device, without gradients. Returns a result for each
            sample: a tensor [b, ...], a list or tuple of b values, or a dict of these. A module
            runs in evaluation mode.
        data: a dataset with a length, or a ``DataLoader`` of all its samples, whose order is
            ignored; also a loader from `auto_dataloader`.
        dst: global rank that gets the results; None for all.
        kwargs: arguments of `auto_dataloader` that don't choose an order, such as ``batch_size``.

    Returns:
        The results in the order of the dataset: a tensor [samples, ...], a list, or a dict of
        these; an empty list for no samples; None on ranks other than `dst`.

    Raises:
        ArgumentError: `data` has no length or is iterable, or the arguments choose an order, or
            the sampler of `data` leaves out samples or repeats them.
        PeerFailedError: `fn` raised on some rank, or its results aren't one for each sample (on
            every rank; the original is the cause on the rank that failed).
        CollectiveMismatchError: ranks have results of different names, kinds, dtypes or shapes (on
            every rank).

    Example:
        >>> import unisono as idist
        >>> idist.evaluate(lambda batch: batch * 2, [1, 2, 3], batch_size=2)
        tensor([2, 4, 6])
    """
    dataset = data.dataset if isinstance(data, DataLoader) else data
    chosen = sorted(kwargs.keys() & {"sampler", "batch_sampler", "shuffle", "drop_last"})
    if chosen or not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        what = "the dataset has no length, or is iterable"
        what = f"{', '.join(chosen)} can't be given" if chosen else what
        raise ArgumentError(f"evaluate takes all samples in order: {what}")
    if isinstance(data, DataLoader):
        _check_sampler(data, len(dataset))
    context = communicator()
    check_rank(context, None, 0 if dst is None else dst, "dst")
    loader = auto_dataloader(data, shuffle=False, drop_last=False, **kwargs)

    def results() -> tuple[Columns, dict[str | None, Kind]]:
        columns = _results(fn, loader)
        return columns, {name: _kind(part) for name, part in columns.items()}

    # One miss only: a rank that is absent again has left evaluate, as its batch was too large.
    columns, kinds = together(context, "evaluate", results, misses=1)
    # Compared before the first gather, which would wait for ranks without results of this name.
    if any(other != kinds[0] for other in kinds):
        raise CollectiveMismatchError(f"evaluate: results differ in kind between ranks: {kinds}")
    made: Columns = dict.fromkeys(columns)
    for name in sorted(columns, key=str):  # ranks may have results in different orders
        made[name] = gather_results(columns[name], len(dataset), dst)
    if dst not in (None, context.model.topology.rank):
        return None
    # Results that `fn` returned without a name have the name None.
    return made.get(None, made) if made else []


def _check_sampler(loader: DataLoader[Any], size: int) -> None:
    """Raise if the loader's sampler does not draw every sample once."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if isinstance(sampler, DistributedProxySampler):
        sampler = sampler.sampler
    # The ranks' parts of a distributed sampler add up to every sample.
    if isinstance(sampler, (SequentialSampler, DistributedSampler, EvaluationSampler)):
        return
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size:
        return
    # Only a draw shows which samples another sampler takes; a batch sampler draws lists.
    indices = [i for item in sampler for i in (item if isinstance(item, list) else [item])]
    if sorted(indices) != list(range(size)):
        raise ArgumentError(
            f"evaluate takes each of the {size} samples once, and the loader's sampler, a "
            f"{type(sampler).__qualname__}, draws {len(indices)}: give it a torch.utils.data.Subset"
        )


def _results(fn: Callable[[Any], Any], loader: Any) -> Columns:
    """Return the results of all batches by name."""
    parts: dict[str | None, list[Any]] = {}
    left = len(loader.sampler)  # of this rank; the last batch may be smaller than the others
    with torch.no_grad(), _in_evaluation_mode(fn):
        for index, batch in enumerate(loader):
            count = min(loader.batch_size or 1, left)  # without a batch size, one sample
            left -= count
            results = fn(batch)
            named = results if isinstance(results, dict) else {None: results}
            for name, part in named.items():
                _check_results(name, part, count)
            if parts and named.keys() != parts.keys():
                raise ArgumentError(
                    f"evaluate: batch {index} returned results named {sorted(named, key=str)}, "
                    f"earlier batches {sorted(parts, key=str)}: return the same names each time"
                )
            for name, part in named.items():
                parts.setdefault(name, []).append(part)
    return {name: _joined(column) for name, column in parts.items()}


def _check_results(name: str | None, part: Any, count: int) -> None:
    """Raise unless `part` has one result for each of `count` samples."""

    def is_column(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count

    if not isinstance(part, (Tensor, list, tuple)) or (isinstance(part, Tensor) and not part.dim()):
        shown = "a 0-dim tensor" if isinstance(part, Tensor) else f"a {type(part).__qualname__}"
    # A model that returns (logits, boxes) means two results of the batch, not one per sample.
    elif isinstance(part, tuple) and part and all(map(is_column, part)):
        shown = f"a tuple of {len(part)} tensors for all of them"
    elif len(part) != count:
        shown = f"{len(part)} results"
    else:
        return
    raise ArgumentError(
        f"evaluate: a batch of {count} samples gave {shown}{f' as {name!r}' if name else ''}: "
        "return one result for each, in a tensor or a list, or a dict of several of these"
    )


def _joined(parts: list[Any]) -> Any:
    """Concatenate the results of all batches: tensors, else lists."""
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat(parts)
    return [item for part in parts for item in part]


@contextmanager
def _in_evaluation_mode(fn: Any) -> Iterator[None]:
    """Put a module into evaluation mode in a block, and restore the modes of its parts."""
    modules = [part for part in fn.modules() if part.training] if isinstance(fn, nn.Module) else []
    if modules:
        fn.eval()
    try:
        yield
    finally:
        # Not with train(), which would include parts that were in evaluation mode before.
        for part in modules:
            part.training = True
