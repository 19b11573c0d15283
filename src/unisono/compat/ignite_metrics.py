"""Support for ignite's metrics and handlers on every model: ``ignite_metrics.install()``.

Ignite's metrics use ``ignite.distributed``, which supports torch.distributed, Horovod and XLA. This
module adds a computation model to it that calls the facade. It imports pytorch-ignite.
"""

from __future__ import annotations

from typing import Any

from ignite.distributed import utils
from ignite.distributed.comp_models.base import ComputationModel

from unisono import facts
from unisono.collectives import broadcasts, gathers, groups, membership, reductions
from unisono.context import current
from unisono.lifecycle import finalize

__all__ = ("install",)


def install() -> None:
    """Register the facade in ``ignite.distributed``, which uses it if it finds no context itself.

    Idempotent. From then on ignite's metrics in this process are computed over all replicas of
    threads, MPI and plug-in models, too.

    Example:
        >>> from unisono.compat import ignite_metrics  # doctest: +SKIP
        >>> ignite_metrics.install()  # doctest: +SKIP
    """
    if _FacadeModel not in utils.registered_computation_models:
        utils.registered_computation_models += (_FacadeModel,)


class _FacadeModel(ComputationModel):  # type: ignore[misc]  # ignite has no types
    """An ignite computation model that calls the facade each time, so it is never stale."""

    name = "unisono"
    available_backends = ()

    get_local_rank = staticmethod(facts.get_local_rank)
    get_rank = staticmethod(facts.get_rank)
    get_world_size = staticmethod(facts.get_world_size)
    get_nproc_per_node = staticmethod(facts.get_nproc_per_node)
    get_nnodes = staticmethod(facts.get_nnodes)
    get_node_rank = staticmethod(facts.get_node_rank)
    _compute_nproc_per_node = staticmethod(facts.get_nproc_per_node)
    device = staticmethod(facts.device)
    backend = staticmethod(facts.backend)
    finalize = staticmethod(finalize)
    barrier = staticmethod(groups.barrier)
    all_reduce = staticmethod(reductions.all_reduce)
    all_gather = staticmethod(gathers.all_gather)
    new_group = staticmethod(groups.new_group)
    _do_all_reduce = staticmethod(reductions.all_reduce)
    _do_all_gather = staticmethod(gathers.all_gather)
    _do_all_gather_object = staticmethod(gathers.all_gather)
    _do_broadcast = staticmethod(broadcasts.broadcast)
    _do_new_group = staticmethod(groups.new_group)

    def broadcast(self, tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:
        """Send a value of global rank `src` to all ranks. Collective over all ranks."""
        return broadcasts.broadcast(tensor, src, safe_mode=safe_mode)

    def _rank_not_in_group(self, group: Any) -> bool:
        context = current()
        members = context.model.topology.members(membership.resolve(context, group))
        return facts.get_rank() not in members

    @staticmethod
    def create_from_context() -> _FacadeModel | None:
        """Return a model if the facade has a distributed context, else None."""
        return _FacadeModel() if facts.is_distributed() else None

    @staticmethod
    def create_from_backend(backend: str, **kwargs: Any) -> _FacadeModel:
        """Raise NotImplementedError: ignite cannot create a context here."""
        raise NotImplementedError("make the context with unisono.initialize or unisono.spawn")

    @staticmethod
    def spawn(*args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError: ignite cannot start replicas here."""
        raise NotImplementedError("start the replicas with unisono.spawn")
