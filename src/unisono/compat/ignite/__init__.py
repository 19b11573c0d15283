"""The names of ``ignite.distributed``: ``import unisono.compat.ignite as idist``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono import lazy_import as _lazy_import

if TYPE_CHECKING:
    from unisono.compat.ignite import (
        auto as auto,
        comp_models as comp_models,
        launcher as launcher,
        utils as utils,
    )
    from unisono.compat.ignite.auto import (
        DistributedProxySampler as DistributedProxySampler,
        auto_dataloader as auto_dataloader,
        auto_model as auto_model,
        auto_optim as auto_optim,
    )
    from unisono.compat.ignite.comp_models import native as native, xla as xla
    from unisono.compat.ignite.launcher import Parallel as Parallel
    from unisono.compat.ignite.utils import (
        all_gather as all_gather,
        all_gather_tensors_with_shapes as all_gather_tensors_with_shapes,
        all_reduce as all_reduce,
        available_backends as available_backends,
        backend as backend,
        barrier as barrier,
        broadcast as broadcast,
        device as device,
        finalize as finalize,
        get_local_rank as get_local_rank,
        get_nnodes as get_nnodes,
        get_node_rank as get_node_rank,
        get_nproc_per_node as get_nproc_per_node,
        get_rank as get_rank,
        get_world_size as get_world_size,
        has_hvd_support as has_hvd_support,
        has_native_dist_support as has_native_dist_support,
        has_xla_support as has_xla_support,
        hostname as hostname,
        initialize as initialize,
        model_name as model_name,
        new_group as new_group,
        one_rank_first as one_rank_first,
        one_rank_only as one_rank_only,
        registered_computation_models as registered_computation_models,
        set_local_rank as set_local_rank,
        show_config as show_config,
        spawn as spawn,
        sync as sync,
    )
else:
    _lazy_import.attach(__name__, *_lazy_import.OF_IDIST)
