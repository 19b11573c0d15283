"""Support for torchmetrics on every model: ``MeanMetric(**torchmetrics.OPTIONS)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from unisono import facts
from unisono.collectives import gathers, membership
from unisono.context import current

__all__ = ("OPTIONS", "gather_all_tensors")


def gather_all_tensors(result: Tensor, group: Any = None) -> list[Tensor]:
    """Gather the tensors of all ranks, like torchmetrics' function of that name.

    Collective over `group`.

    Args:
        result: [*shape], whose sizes may differ between ranks.
        group: a group of ranks; None for all ranks.

    Returns:
        One tensor for each rank, in rank order, in its own shape. This rank's entry is `result`
        itself, so that its gradient is kept; the others are new memory.

    Raises:
        CollectiveMismatchError: dtypes differ (on every rank).

    Example:
        >>> import torch
        >>> from unisono.compat import torchmetrics
        >>> torchmetrics.gather_all_tensors(torch.tensor([1.0, 2.0]))
        [tensor([1., 2.])]
    """
    context = current()
    members = context.model.topology.members(membership.resolve(context, group))
    rank = facts.get_rank()
    if rank not in members:
        return [result]
    parts: list[Tensor] = gathers.all_gather(result.detach(), group, uneven=True)
    parts[members.index(rank)] = result
    return parts


OPTIONS: Mapping[str, Callable[..., Any]] = {
    "dist_sync_fn": gather_all_tensors,
    "distributed_available_fn": facts.is_distributed,
}
"""Keyword arguments for any ``torchmetrics.Metric``, which is then computed over all ranks."""
