"""Memory that comes several times in a list of tensors: tied weights, and views of one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ("OVERLAPS", "aliases")

OVERLAPS = -1
"""What stands for a tensor that shares a part of its memory with another, or with itself."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """From which byte of the device's memory to which a tensor reaches."""

    place: int
    tensor: Tensor
    device: str
    start: int
    end: int

    @property
    def is_dense(self) -> bool:
        return self.end - self.start == self.tensor.nbytes


def aliases(names: Sequence[object], tensors: Sequence[Tensor | None]) -> list[int]:
    """Tell for each tensor which one of the list its memory belongs to.

    Local.

    Args:
        names: whose tensors they are: where an object comes twice, its tensor does.
        tensors: dense ones, or None where there is nothing to look at.

    Returns:
        For each its own place, or that of the tensor whose memory has all of it, or `OVERLAPS`.
    """
    known: dict[int, int] = {}
    owners = [known.setdefault(id(name), place) for place, name in enumerate(names)]
    extents = []
    for place, tensor in enumerate(tensors):
        if tensor is not None and owners[place] == place and tensor.numel():
            extent = _extent(place, tensor)
            if extent is None:
                owners[place] = OVERLAPS
            elif extent.start:  # what has no address is known by its identity alone
                extents.append(extent)
    for cluster in _clusters(extents):
        _share(cluster, owners)
    return [owner if owner == OVERLAPS else owners[owner] for owner in owners]


def _extent(place: int, tensor: Tensor) -> _Extent | None:
    """Give where a tensor lies, None if one of its elements is there more than once. Local."""
    steps = list(zip(tensor.shape, tensor.stride(), strict=True))
    if any(stride == 0 and size > 1 for size, stride in steps):
        return None
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    end = start + (last + 1) * tensor.itemsize
    if end - start < tensor.nbytes:
        return None
    return _Extent(place, tensor, str(tensor.device), start, end)


def _clusters(extents: list[_Extent]) -> Iterator[list[_Extent]]:
    """Yield the extents that reach into each other, where these are several. Local."""
    extents.sort(key=lambda each: (each.device, each.start, -each.end, each.place))
    cluster: list[_Extent] = []
    end = 0
    for each in extents:
        if cluster and (each.device != cluster[0].device or each.start >= end):
            if len(cluster) > 1:
                yield cluster
            cluster = []
        end = max(end, each.end) if cluster else each.end
        cluster.append(each)
    if len(cluster) > 1:
        yield cluster


def _share(cluster: list[_Extent], owners: list[int]) -> None:
    """Note which of the extents of a cluster belong to which. Local."""
    first = cluster[0]
    is_covered = all(each.end <= first.end for each in cluster)
    if is_covered and first.is_dense and len({each.tensor.dtype for each in cluster}) == 1:
        for each in cluster[1:]:
            owners[each.place] = first.place
        return
    _share_by_elements(cluster, owners)


def _share_by_elements(cluster: list[_Extent], owners: list[int]) -> None:
    """Do as `_share` where only the elements tell: columns of a matrix, diagonals. Local."""
    unit = min(each.tensor.itemsize for each in cluster)
    start = cluster[0].start
    marks = torch.full(((max(each.end for each in cluster) - start) // unit,), -1)
    for each in sorted(cluster, key=lambda each: (-each.tensor.nbytes, each.place)):
        width = each.tensor.itemsize // unit
        mine = marks.as_strided(
            (*each.tensor.shape, width),
            (*(stride * width for stride in each.tensor.stride()), 1),
            (each.start - start) // unit,
        )
        there = torch.unique(mine).tolist()
        if there == [-1]:
            mine.fill_(each.place)
        elif len(there) == 1 and _is_part(each, cluster, there[0]):
            owners[each.place] = there[0]
        else:
            owners[each.place] = OVERLAPS


def _is_part(extent: _Extent, cluster: list[_Extent], owner: int) -> bool:
    whole = next(each for each in cluster if each.place == owner)
    is_aligned = (extent.start - whole.start) % extent.tensor.itemsize == 0
    return is_aligned and extent.tensor.dtype is whole.tensor.dtype
