"""One Python API for every way PyTorch goes distributed.

``import unisono as idist``, then the same script runs alone, under ``torch.distributed``, as
threads of one process, and on every backend that somebody ships as a plug-in.

A name is loaded when it is first asked for, so that what needs no torch (the command line's help,
plug-ins of environments, the process beside each rank of a script) doesn't wait for it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from unisono.models.native import registration as _registration

if TYPE_CHECKING:
    from unisono import errors
    from unisono.collectives.broadcasts import all_to_all, broadcast, broadcast_, scatter
    from unisono.collectives.gathers import all_gather, all_gather_tensors_with_shapes, gather
    from unisono.collectives.groups import barrier, local_group, new_group
    from unisono.collectives.p2p import recv, send
    from unisono.collectives.reductions import (
        all_reduce,
        all_reduce_,
        exact_sum,
        reduce,
        reduce_scatter,
    )
    from unisono.collectives.sharing import shared, shared_empty
    from unisono.compat.mmcv import get_dist_info, infer_launcher, init_dist
    from unisono.deadlines import deadline
    from unisono.errors import UnisonoError
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
        is_distributed,
        is_main_process,
        model_name,
        set_local_rank,
        show_config,
    )
    from unisono.lifecycle import finalize, initialize, spawn, sync
    from unisono.model.contract import ComputationModel
    from unisono.model.handle import Handle
    from unisono.model.reduction import ReduceOp
    from unisono.observe.trace import trace
    from unisono.observe.watching import Watch, watching
    from unisono.parallel import Parallel
    from unisono.pool.pool import WorkerPool
    from unisono.recording import CollectiveRecord, add_hook
    from unisono.registry import available_backends, register_model
    from unisono.sections import master_only, one_rank_first, one_rank_only, run_on_rank
    from unisono.topology import ContextHint, Group, LaunchPlan, RankInfo, Topology
    from unisono.training.averaging import (
        all_reduce_grads,
        all_reduce_params,
        broadcast_optimizer_state,
        broadcast_params,
    )
    from unisono.training.batch_size import find_executable_batch_size
    from unisono.training.batchnorm import (
        SyncBatchNorm,
        convert_sync_batchnorm,
        register_sync_batchnorm,
    )
    from unisono.training.checkpoint_manager import CheckpointManager
    from unisono.training.checkpoints import load_checkpoint, save_checkpoint
    from unisono.training.clipping import clip_grad_norm_
    from unisono.training.data_parallel import Replicated
    from unisono.training.equality import assert_equal
    from unisono.training.evaluation import EvaluationSampler, evaluate, gather_results
    from unisono.training.loader import ReplicaLoader
    from unisono.training.loading import DistributedProxySampler, auto_dataloader
    from unisono.training.preemption import preemptible, preemption_point
    from unisono.training.randomness import (
        get_rng_state,
        rank_generator,
        seed_everything,
        set_rng_state,
        sync_random_seed,
    )
    from unisono.training.states import ByRank
    from unisono.training.streams import shard
    from unisono.training.toolbox import (
        RankFilter,
        RankFormatter,
        get_current_memory_gb,
        get_device_memory_gb,
        print,
        progress,
        reduce_dict,
        reduce_mean,
        reduce_sum,
    )
    from unisono.training.wrapping import (
        auto_model,
        auto_optim,
        join,
        no_sync,
        register_wrapper,
        unwrap_model,
    )

    registered_computation_models: tuple[type[ComputationModel], ...]
    has_native_dist_support: bool
    has_hvd_support: bool
    has_xla_support: bool
    has_mpi_support: bool

__version__ = "0.1.0"
__all__ = (
    "ByRank",
    "CheckpointManager",
    "CollectiveRecord",
    "ComputationModel",
    "ContextHint",
    "DistributedProxySampler",
    "EvaluationSampler",
    "Group",
    "Handle",
    "LaunchPlan",
    "Parallel",
    "RankFilter",
    "RankFormatter",
    "RankInfo",
    "ReduceOp",
    "ReplicaLoader",
    "Replicated",
    "SyncBatchNorm",
    "Topology",
    "UnisonoError",
    "Watch",
    "WorkerPool",
    "add_hook",
    "all_gather",
    "all_gather_tensors_with_shapes",
    "all_reduce",
    "all_reduce_",
    "all_reduce_grads",
    "all_reduce_params",
    "all_to_all",
    "assert_equal",
    "auto_dataloader",
    "auto_model",
    "auto_optim",
    "available_backends",
    "backend",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_optimizer_state",
    "broadcast_params",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "deadline",
    "device",
    "errors",
    "evaluate",
    "exact_sum",
    "finalize",
    "find_executable_batch_size",
    "gather",
    "gather_results",
    "get_current_memory_gb",
    "get_device_memory_gb",
    "get_dist_info",
    "get_local_rank",
    "get_nnodes",
    "get_node_rank",
    "get_nproc_per_node",
    "get_rank",
    "get_rng_state",
    "get_world_size",
    "has_hvd_support",
    "has_mpi_support",
    "has_native_dist_support",
    "has_xla_support",
    "hostname",
    "infer_launcher",
    "init_dist",
    "initialize",
    "is_distributed",
    "is_main_process",
    "join",
    "load_checkpoint",
    "local_group",
    "master_only",
    "model_name",
    "new_group",
    "no_sync",
    "one_rank_first",
    "one_rank_only",
    "preemptible",
    "preemption_point",
    "print",
    "progress",
    "rank_generator",
    "recv",
    "reduce",
    "reduce_dict",
    "reduce_mean",
    "reduce_scatter",
    "reduce_sum",
    "register_model",
    "register_sync_batchnorm",
    "register_wrapper",
    "registered_computation_models",
    "run_on_rank",
    "save_checkpoint",
    "scatter",
    "seed_everything",
    "send",
    "set_local_rank",
    "set_rng_state",
    "shard",
    "shared",
    "shared_empty",
    "show_config",
    "spawn",
    "sync",
    "sync_random_seed",
    "trace",
    "unwrap_model",
    "watching",
)


# Where each name is defined. What a rank of any program is likely to use comes first.
_CORE = {
    "unisono.collectives.gathers": (
        "all_gather",
        "all_gather_tensors_with_shapes",
        "gather",
    ),
    "unisono.collectives.groups": (
        "barrier",
        "local_group",
        "new_group",
    ),
    "unisono.collectives.p2p": (
        "recv",
        "send",
    ),
    "unisono.collectives.reductions": (
        "all_reduce",
        "all_reduce_",
        "exact_sum",
        "reduce",
        "reduce_scatter",
    ),
    "unisono.collectives.broadcasts": (
        "all_to_all",
        "broadcast",
        "broadcast_",
        "scatter",
    ),
    "unisono.deadlines": ("deadline",),
    "unisono.errors": ("UnisonoError",),
    "unisono.facts": (
        "backend",
        "device",
        "get_local_rank",
        "get_nnodes",
        "get_node_rank",
        "get_nproc_per_node",
        "get_rank",
        "get_world_size",
        "hostname",
        "is_distributed",
        "is_main_process",
        "model_name",
        "set_local_rank",
        "show_config",
    ),
    "unisono.model.handle": ("Handle",),
    "unisono.lifecycle": (
        "finalize",
        "initialize",
        "spawn",
        "sync",
    ),
    "unisono.model.contract": ("ComputationModel",),
    "unisono.parallel": ("Parallel",),
    "unisono.model.reduction": ("ReduceOp",),
    "unisono.registry": (
        "available_backends",
        "register_model",
    ),
    "unisono.sections": (
        "master_only",
        "one_rank_first",
        "one_rank_only",
        "run_on_rank",
    ),
    "unisono.topology": (
        "ContextHint",
        "Group",
        "LaunchPlan",
        "RankInfo",
        "Topology",
    ),
}
_EXTRAS = {
    "unisono.collectives.sharing": (
        "shared",
        "shared_empty",
    ),
    "unisono.observe.trace": ("trace",),
    "unisono.observe.watching": (
        "Watch",
        "watching",
    ),
    "unisono.pool.pool": ("WorkerPool",),
    "unisono.recording": (
        "CollectiveRecord",
        "add_hook",
    ),
    "unisono.training.averaging": (
        "all_reduce_grads",
        "all_reduce_params",
        "broadcast_optimizer_state",
        "broadcast_params",
    ),
    "unisono.training.batch_size": ("find_executable_batch_size",),
    "unisono.training.batchnorm": (
        "SyncBatchNorm",
        "convert_sync_batchnorm",
        "register_sync_batchnorm",
    ),
    "unisono.training.checkpoint_manager": ("CheckpointManager",),
    "unisono.training.checkpoints": (
        "load_checkpoint",
        "save_checkpoint",
    ),
    "unisono.training.clipping": ("clip_grad_norm_",),
    "unisono.training.equality": ("assert_equal",),
    "unisono.training.evaluation": (
        "EvaluationSampler",
        "evaluate",
        "gather_results",
    ),
    "unisono.training.loader": ("ReplicaLoader",),
    "unisono.training.loading": (
        "DistributedProxySampler",
        "auto_dataloader",
    ),
    "unisono.training.streams": ("shard",),
    "unisono.training.preemption": ("preemptible", "preemption_point"),
    "unisono.training.states": ("ByRank",),
    "unisono.training.toolbox": (
        "RankFilter",
        "RankFormatter",
        "get_current_memory_gb",
        "get_device_memory_gb",
        "print",
        "progress",
        "reduce_dict",
        "reduce_mean",
        "reduce_sum",
    ),
    "unisono.training.randomness": (
        "get_rng_state",
        "rank_generator",
        "seed_everything",
        "set_rng_state",
        "sync_random_seed",
    ),
    "unisono.training.data_parallel": ("Replicated",),
    "unisono.compat.mmcv": (
        "get_dist_info",
        "infer_launcher",
        "init_dist",
    ),
    "unisono.training.wrapping": (
        "auto_model",
        "auto_optim",
        "join",
        "no_sync",
        "register_wrapper",
        "unwrap_model",
    ),
}
_MODULE_OF = {name: module for module, names in {**_CORE, **_EXTRAS}.items() for name in names}
# What other programs ask for; no part of the facade.
_HOOKS = {
    "load_ipython_extension": "unisono.notebook.magics",
    "unload_ipython_extension": "unisono.notebook.magics",
}
_LIBRARY_OF = {
    "has_native_dist_support": "torch.distributed",
    "has_hvd_support": "horovod",
    "has_xla_support": "torch_xla",
    "has_mpi_support": "mpi4py",
}


def _preload() -> None:
    """Load the core, for a process whose forks will use it."""
    for module in _CORE:
        importlib.import_module(module)


def __getattr__(name: str) -> Any:
    """Load what is asked for, and answer what idist has as variables."""
    if name in _MODULE_OF:
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value
    if name in _HOOKS:
        return getattr(importlib.import_module(_HOOKS[name]), name)
    if name == "errors":
        return importlib.import_module("unisono.errors")
    if name in _LIBRARY_OF:
        return importlib.util.find_spec(_LIBRARY_OF[name]) is not None
    if name == "registered_computation_models":
        return importlib.import_module("unisono.registry").registered_models()
    similar = difflib.get_close_matches(name, __all__, 1)
    hint = f". Did you mean: {similar[0]!r}?" if similar else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted((*__all__, "__version__"))


_registration.register_with_torch()  # for ``torch.distributed.init_process_group("unisono")``
