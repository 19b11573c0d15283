"""The names of ``ignite.distributed.utils``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.collectives import broadcasts, gathers, groups, reductions
from unisono.collectives.groups import barrier
from unisono.compat.groups import library_group
from unisono.context import current_model, is_serial
from unisono.errors import ArgumentError
from unisono.facts import (
    backend,
    device,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    hostname,
    model_name,
    set_local_rank,
    show_config,
)
from unisono.lazy_import import OF_IDIST, attach
from unisono.lifecycle import finalize, initialize, spawn, sync
from unisono.model.contract import ComputationModel
from unisono.registry import available_backends
from unisono.sections import one_rank_first, one_rank_only

if TYPE_CHECKING:
    has_hvd_support: bool
    has_native_dist_support: bool
    has_xla_support: bool
    registered_computation_models: tuple[type[ComputationModel], ...]

__all__ = (
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "device",
    "finalize",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_world_size",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "initialize",
    "model_name",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
)


def all_reduce(tensor: Any, op: Any = "SUM", group: Any = None, **options: Any) -> Any:
    """Reduce a value of every rank to one value on every rank. Collective over `group`.

    Args:
        tensor: as in the facade's.
        op: as in the facade's.
        group: a list of ranks, or what `new_group` gave; None for all ranks.
        options: the facade's ``async_op``.
    """
    return reductions.all_reduce(tensor, op, _group(group), **options)


def all_gather(tensor: Any, group: Any = None, **options: Any) -> Any:
    """Gather a value of every rank on every rank. Collective over `group`.

    Args:
        tensor: as in the facade's.
        group: as in `all_reduce`.
        options: the facade's ``uneven`` and ``async_op``.
    """
    return gathers.all_gather(tensor, _group(group), **options)


def all_gather_tensors_with_shapes(
    tensor: Tensor, shapes: Sequence[Sequence[int]], group: Any = None, **options: Any
) -> Any:
    """Gather tensors whose shapes every rank knows already. Collective over `group`.

    Args:
        tensor: as in the facade's.
        shapes: as in the facade's.
        group: as in `all_reduce`.
        options: the facade's ``async_op``.
    """
    return gathers.all_gather_tensors_with_shapes(tensor, shapes, _group(group), **options)


def broadcast(
    tensor: Any = None, src: int = 0, safe_mode: bool = False, *, group: Any = None, **options: Any
) -> Any:
    """Return the value of one rank on every rank. Collective over `group`.

    Args:
        tensor: as in the facade's.
        src: global rank whose value travels.
        safe_mode: without effect: every broadcast is safe.
        group: as in `all_reduce`.
        options: the facade's ``async_op``.
    """
    return broadcasts.broadcast(tensor, src, _group(group), safe_mode, **options)


def new_group(ranks: Sequence[int], **kwargs: Any) -> Any:
    """Make a group of ranks: a process group of torch's where torch connects the ranks.

    Collective at creation, over all ranks.

    Args:
        ranks: global ranks.
        kwargs: as in the facade's.

    Returns:
        What every ``group=`` here and in the facade takes; the list itself where nothing is
        distributed.
    """
    if not is_serial(current_model()):
        return library_group(groups.new_group(ranks, **kwargs))
    is_several = isinstance(ranks, (list, tuple, range))
    if not is_several or any(type(rank) is not int for rank in ranks):
        raise ArgumentError(f"ranks should be a list of ints: {ranks!r}")
    return ranks if isinstance(ranks, list) else list(ranks)


def _group(group: Any) -> Any:
    """Give what the facade takes: alone, a list may name ranks that would be there with others."""
    is_list = isinstance(group, list) and all(type(rank) is int for rank in group)
    return None if is_list and is_serial(current_model()) else group


attach(__name__, *OF_IDIST)
