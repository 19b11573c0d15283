"""One Python API for every way PyTorch goes distributed.

``import unisono as idist``, then the same script runs alone, under ``torch.distributed``, as
threads of one process, and on any backend of a plug-in.

Names are loaded at first use, so that parts that need no torch (the command line's help,
plug-ins of environments, the process beside each rank of a script) start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono import lazy_import as _lazy_import
from unisono.models.native import registration as _registration

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unisono import errors as errors
    from unisono.collectives.broadcasts import (
        all_to_all as all_to_all,
        broadcast as broadcast,
        broadcast_ as broadcast_,
        scatter as scatter,
    )
    from unisono.collectives.gathers import (
        all_gather as all_gather,
        all_gather_tensors_with_shapes as all_gather_tensors_with_shapes,
        gather as gather,
    )
    from unisono.collectives.groups import (
        barrier as barrier,
        local_group as local_group,
        new_group as new_group,
    )
    from unisono.collectives.p2p import (
        recv as recv,
        send as send,
    )
    from unisono.collectives.reductions import (
        all_reduce as all_reduce,
        all_reduce_ as all_reduce_,
        exact_sum as exact_sum,
        reduce as reduce,
        reduce_scatter as reduce_scatter,
    )
    from unisono.collectives.sharing import (
        shared as shared,
        shared_empty as shared_empty,
    )
    from unisono.compat.mmcv import (
        get_dist_info as get_dist_info,
        infer_launcher as infer_launcher,
        init_dist as init_dist,
    )
    from unisono.deadlines import deadline as deadline
    from unisono.errors import UnisonoError as UnisonoError
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
        is_distributed as is_distributed,
        is_main_process as is_main_process,
        model_name as model_name,
        set_local_rank as set_local_rank,
        show_config as show_config,
    )
    from unisono.lifecycle import (
        finalize as finalize,
        initialize as initialize,
        spawn as spawn,
        sync as sync,
    )
    from unisono.model.contract import ComputationModel as ComputationModel
    from unisono.model.handle import Handle as Handle
    from unisono.model.reduction import ReduceOp as ReduceOp
    from unisono.notebook.magics import (
        load_ipython_extension as load_ipython_extension,
        unload_ipython_extension as unload_ipython_extension,
    )
    from unisono.observe.watching import (
        Watch as Watch,
        watching as watching,
    )
    from unisono.parallel import Parallel as Parallel
    from unisono.pool.pool import WorkerPool as WorkerPool
    from unisono.recording.records import (
        CollectiveRecord as CollectiveRecord,
        add_hook as add_hook,
    )
    from unisono.recording.trace import trace as trace
    from unisono.registry import (
        available_backends as available_backends,
        register_model as register_model,
    )
    from unisono.sections import (
        master_only as master_only,
        one_rank_first as one_rank_first,
        one_rank_only as one_rank_only,
        run_on_rank as run_on_rank,
    )
    from unisono.topology import (
        ContextHint as ContextHint,
        Group as Group,
        LaunchPlan as LaunchPlan,
        RankInfo as RankInfo,
        Topology as Topology,
    )
    from unisono.training.averaging import (
        all_reduce_grads as all_reduce_grads,
        all_reduce_params as all_reduce_params,
        broadcast_optimizer_state as broadcast_optimizer_state,
        broadcast_params as broadcast_params,
    )
    from unisono.training.batch_size import (
        find_executable_batch_size as find_executable_batch_size,
        get_current_memory_gb as get_current_memory_gb,
        get_device_memory_gb as get_device_memory_gb,
    )
    from unisono.training.batchnorm import (
        SyncBatchNorm as SyncBatchNorm,
        convert_sync_batchnorm as convert_sync_batchnorm,
        register_sync_batchnorm as register_sync_batchnorm,
    )
    from unisono.training.checkpoint_manager import CheckpointManager as CheckpointManager
    from unisono.training.checkpoints import (
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from unisono.training.clipping import clip_grad_norm_ as clip_grad_norm_
    from unisono.training.data_parallel import Replicated as Replicated
    from unisono.training.equality import assert_equal as assert_equal
    from unisono.training.evaluation import (
        EvaluationSampler as EvaluationSampler,
        evaluate as evaluate,
        gather_results as gather_results,
    )
    from unisono.training.loader import ReplicaLoader as ReplicaLoader, shard as shard
    from unisono.training.loading import (
        DistributedProxySampler as DistributedProxySampler,
        auto_dataloader as auto_dataloader,
    )
    from unisono.training.output import (
        RankFilter as RankFilter,
        RankFormatter as RankFormatter,
        print as print,
    )
    from unisono.training.preemption import (
        preemptible as preemptible,
        preemption_point as preemption_point,
    )
    from unisono.training.progress import progress as progress
    from unisono.training.randomness import (
        get_rng_state as get_rng_state,
        rank_generator as rank_generator,
        seed_everything as seed_everything,
        set_rng_state as set_rng_state,
        sync_random_seed as sync_random_seed,
    )
    from unisono.training.states import ByRank as ByRank, unwrap_model as unwrap_model
    from unisono.training.value_reductions import (
        reduce_dict as reduce_dict,
        reduce_mean as reduce_mean,
        reduce_sum as reduce_sum,
    )
    from unisono.training.wrapping import (
        auto_model as auto_model,
        auto_optim as auto_optim,
        join as join,
        no_sync as no_sync,
        register_wrapper as register_wrapper,
    )

    registered_computation_models: tuple[type[ComputationModel], ...]
    has_native_dist_support: bool
    has_hvd_support: bool
    has_xla_support: bool
    has_mpi_support: bool
    __all__: tuple[str, ...]
else:
    _lazy_import.attach(
        __name__,
        *_lazy_import.VARIABLES,
        hidden=("load_ipython_extension", "unload_ipython_extension"),
    )

_registration.register_with_torch()  # for ``torch.distributed.init_process_group("unisono")``
