"""How an optimizer averages gradients on Horovod: by Horovod's own."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch.optim import Optimizer

__all__ = ("wrap_optimizer",)


def wrap_optimizer(
    hvd: ModuleType, optimizer: Optimizer, is_averaged: bool, **options: Any
) -> Optimizer | None:
    """Make a ``DistributedOptimizer``, unless backward averages and no option is given.

    Local.

    Args:
        hvd: the module ``horovod.torch``.
        optimizer: as the user made it.
        is_averaged: whether backward averages the gradients already.
        options: of ``DistributedOptimizer``.

    Returns:
        Horovod's optimizer, None where there is nothing to do.
    """
    if is_averaged and not options:
        return None
    made: Optimizer = hvd.DistributedOptimizer(optimizer, **options)
    return made
