"""The names of ``ignite.distributed``: ``import unisono.compat.ignite as idist``."""

from __future__ import annotations

from unisono.compat.ignite import auto, comp_models, launcher, utils
from unisono.compat.ignite.auto import (
    DistributedProxySampler,
    auto_dataloader,
    auto_model,
    auto_optim,
)
from unisono.compat.ignite.comp_models import native, xla
from unisono.compat.ignite.launcher import Parallel
from unisono.compat.ignite.utils import (
    all_gather,
    all_gather_tensors_with_shapes,
    all_reduce,
    available_backends,
    backend,
    barrier,
    broadcast,
    device,
    finalize,
    get_local_rank,
    get_nnodes,
    get_node_rank,
    get_nproc_per_node,
    get_rank,
    get_world_size,
    hostname,
    initialize,
    model_name,
    new_group,
    one_rank_first,
    one_rank_only,
    set_local_rank,
    show_config,
    spawn,
    sync,
)
from unisono.compat.ignite.variables import VARIABLES, Answer, answer

__all__ = (
    "DistributedProxySampler",
    "Parallel",
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "auto",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "comp_models",
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
    "launcher",
    "model_name",
    "native",
    "new_group",
    "one_rank_first",
    "one_rank_only",
    "registered_computation_models",
    "set_local_rank",
    "show_config",
    "spawn",
    "sync",
    "utils",
    "xla",
)

__getattr__: Answer = answer(__name__, *VARIABLES)
