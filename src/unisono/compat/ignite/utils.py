"""The names of ``ignite.distributed.utils``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono.collectives import broadcasts, gathers, groups, reductions
from unisono.collectives.groups import barrier as barrier
from unisono.context import current_model, is_serial
from unisono.errors import ArgumentError
from unisono.facts import (
    backend as backend,
    device as device,
    get_local_rank as get_local_rank,
    get_nnodes as get_nnodes,
    get_node_rank as get_node_rank,
    get_nproc_per_node as get_nproc_per_node,
    get_rank as get_rank,
    get_world_size as get_world_size,
    hostname as hostname,
    model_name as model_name,
    set_local_rank as set_local_rank,
    show_config as show_config,
)
from unisono.lazy_import import OF_IDIST, attach
from unisono.lifecycle import (
    finalize as finalize,
    initialize as initialize,
    spawn as spawn,
    sync as sync,
)
from unisono.model.contract import ComputationModel
from unisono.registry import available_backends as available_backends
from unisono.sections import one_rank_first as one_rank_first, one_rank_only as one_rank_only

if TYPE_CHECKING:
    has_hvd_support: bool
    has_native_dist_support: bool
    has_xla_support: bool
    registered_computation_models: tuple[type[ComputationModel], ...]


def _with_groups(fn: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Wrap a facade function so that its argument at a position may be an ignite group."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > at:
            args = (*args[:at], _group(args[at]), *args[at + 1 :])
        elif "group" in kwargs:
            kwargs["group"] = _group(kwargs["group"])
        return fn(*args, **kwargs)

    return call


def broadcast(
    tensor: Any = None, src: int = 0, safe_mode: bool = False, *, group: Any = None, **options: Any
) -> Any:
    """Return the value of one rank on every rank. Collective over `group`.

    Args:
        tensor: as in the facade's.
        src: global rank whose value is sent.
        safe_mode: without effect: every broadcast is safe.
        group: a list of ranks, or a result of `new_group`; None for all ranks.
        options: the facade's ``async_op``.
    """
    return broadcasts.broadcast(tensor, src, _group(group), safe_mode, **options)


def new_group(ranks: Sequence[int], **kwargs: Any) -> Any:
    """Create a group of ranks: torch's process group if torch connects the ranks.

    Collective at creation, over all ranks.

    Args:
        ranks: global ranks.
        kwargs: as in the facade's.

    Returns:
        A value for every ``group=`` here and in the facade; the list itself without a
        distributed context.
    """
    if not is_serial(current_model()):
        return groups.library_group(groups.new_group(ranks, **kwargs))
    # Without a context the list may name ranks that are absent, so only its types are checked.
    is_several = isinstance(ranks, (list, tuple, range))
    if not is_several or any(type(rank) is not int for rank in ranks):
        raise ArgumentError(f"ranks should be a list of ints: {ranks!r}")
    return ranks if isinstance(ranks, list) else list(ranks)


def _group(group: Any) -> Any:
    """Return the facade's group; without peers None for a list, which may name absent ranks."""
    is_list = isinstance(group, list) and all(type(rank) is int for rank in group)
    return None if is_list and is_serial(current_model()) else group


# Their group may be a list of ranks, or a result of `new_group`.
all_reduce: Callable[..., Any] = _with_groups(reductions.all_reduce, 2)
all_gather: Callable[..., Any] = _with_groups(gathers.all_gather, 1)
all_gather_tensors_with_shapes: Callable[..., Any] = _with_groups(
    gathers.all_gather_tensors_with_shapes, 2
)

_OWN = ("all_gather", "all_gather_tensors_with_shapes", "all_reduce", "broadcast", "new_group")
_INTERNAL = (
    *("ArgumentError", "ComputationModel", "OF_IDIST", "attach", "broadcasts", "current_model"),
    *("gathers", "groups", "is_serial", "reductions"),
)
attach(__name__, *OF_IDIST, *_OWN, hidden=_INTERNAL)
