"""Evaluate every sample exactly once, with the results in the order of the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from torch import Tensor
from torch.utils.data import Sampler

from unisono.arguments import check_count
from unisono.collectives.gathers import all_gather, gather
from unisono.collectives.membership import check_rank
from unisono.collectives.value_types import T
from unisono.context import current, current_model
from unisono.errors import ArgumentError, CollectiveMismatchError

__all__ = ("EvaluationSampler", "gather_results")


class EvaluationSampler(Sampler[int]):
    """Distributes samples in turn, each to one rank, without padding and without shuffling.

    Local. Ranks may get one sample more than others, or none, so call no collective within the loop
    over them; `gather_results` puts the results in order.

    Args:
        dataset: anything with a length, the same on every rank.
        num_replicas: number of replicas; None for the job's.
        rank: of this one; None for the job's.

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
        """Do nothing: for loops that call it on any sampler. Local."""


@overload
def gather_results(part: Tensor, size: int, dst: None = None) -> Tensor: ...


@overload
def gather_results(part: list[T] | tuple[T, ...], size: int, dst: None = None) -> list[T]: ...


@overload
def gather_results(part: Tensor, size: int, dst: int | None) -> Tensor | None: ...


@overload
def gather_results(part: list[T] | tuple[T, ...], size: int, dst: int | None) -> list[T] | None: ...


def gather_results(part: Sequence[Any] | Tensor, size: int, dst: int | None = None) -> Any:
    """Put the results of all ranks together in the order of the dataset.

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
        ArgumentError: `part` isn't a list, tuple or tensor, or `dst` isn't there.
        CollectiveMismatchError: a rank has fewer results than it had samples, or tensors whose
            samples have different shapes (on every rank that gets them).
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> idist.gather_results(["a", None, "c"], size=3)
        ['a', None, 'c']
    """
    if not isinstance(part, (list, tuple, Tensor)):
        raise ArgumentError(f"results should be a list or a tensor, not {type(part).__qualname__}")
    size = check_count("size", size, 0)
    context = current()
    mine = part if isinstance(part, Tensor) else list(part)
    parts: Any
    if dst is None:
        parts = all_gather(mine, uneven=True)
    else:
        check_rank(context, None, dst, "dst")
        lists = gather([mine], dst=dst)
        parts = None if lists is None else [item for (item,) in lists]
    n = context.model.topology.world_size
    counts = all_gather(len(mine)) if dst is not None else [len(item) for item in parts]
    short = [rank for rank in range(n) if counts[rank] < len(range(rank, size, n))]
    if short:
        raise CollectiveMismatchError(
            f"gather_results of {size} over {n} ranks: ranks {short} have too few: by rank there "
            f"are {counts}, and rank r needs one for each of r, r + {n}, ... below {size}"
        )
    if parts is None:
        return None
    if isinstance(part, Tensor):
        return _interleaved(parts, size)
    return [parts[i % n][i // n] for i in range(size)]


def _interleaved(parts: Sequence[Tensor], size: int) -> Tensor:
    """Put [k, ...] of each of n ranks, whose rank r has the samples r, r + n, ..., in order."""
    shapes = {tuple(item.shape[1:]) for item in parts}
    if len(shapes) > 1:
        raise CollectiveMismatchError(f"gather_results of different shapes: {sorted(shapes)}")
    joined = parts[0].new_empty((size, *parts[0].shape[1:]))
    for rank, item in enumerate(parts):
        target = joined[rank :: len(parts)]
        target.copy_(item[: len(target)])
    return joined
