"""The names of ``ignite.distributed.utils``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unisono.collectives.gathers import all_gather, all_gather_tensors_with_shapes
from unisono.collectives.groups import barrier, new_group
from unisono.collectives.reductions import all_reduce
from unisono.collectives.transfers import broadcast
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
from unisono.lifecycle import finalize, initialize, spawn, sync
from unisono.model import ComputationModel
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

VARIABLES = frozenset(
    {
        *("has_hvd_support", "has_native_dist_support", "has_xla_support"),
        "registered_computation_models",
    }
)


def __getattr__(name: str) -> Any:
    """Answer what ignite has as variables, at the moment when it is asked. Local."""
    if name in VARIABLES:
        return getattr(importlib.import_module("unisono"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
