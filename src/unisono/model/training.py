"""Optional hooks for training helpers; the defaults do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.accelerators import can_pin_for
from unisono.model.contract import ComputationModel

__all__ = ("TrainingHooks", "hooks_of")


class TrainingHooks:
    """Hooks that ``training`` calls on a model that inherits it, beside the contract."""

    device: Any
    averages_in_step: bool = False
    """Whether `auto_optim` makes the step of optimizers average, because backward can't."""

    def wrap_module(self, module: nn.Module, wrapper: str, **options: Any) -> nn.Module | None:
        """Wrap a module so that it trains on all replicas, in the library's own way.

        Collective over all ranks.

        Args:
            module: on the model's device.
            wrapper: ``"ddp"`` or ``"fsdp"``.
            options: the user's options to `auto_model` for the wrapper.

        Returns:
            The module, wrapped or as it is, with equal parameters on all ranks; None if the library
            has no such wrapper: for ``"ddp"`` gradients are then averaged through the model's own
            all_reduce.
        """
        return None

    def wrap_optimizer(
        self, optimizer: Optimizer, *, is_averaged: bool, **options: Any
    ) -> Optimizer | None:
        """Adapt an optimizer to the library.

        Args:
            optimizer: the user's optimizer.
            is_averaged: whether backward already averages the gradients of its parameters.
            options: the user's options to `auto_optim`.

        Returns:
            An optimizer whose ``step`` averages the gradients itself, instead of backward; None
            if there is nothing to adapt, and the library takes none of the options.
        """
        return None

    def settle_gradients(self, optimizer: Optimizer) -> Callable[[], None] | None:
        """Average the gradients now instead of in ``optimizer.step``.

        Collective over all ranks, as the step would be.

        Args:
            optimizer: from `wrap_optimizer`, or one that the library itself created.

        Returns:
            A function that lets the step average again, called after a step and at the next
            gradient; None if the step doesn't average.
        """
        average: Callable[[], Callable[[], None]] | None
        average = getattr(optimizer, "unisono_average", None)
        return None if average is None else average()

    def wrap_loader(self, loader: Any) -> Any:
        """Adapt a data loader to the library, such as one that feeds a device."""
        return loader

    @property
    def can_pin_memory(self) -> bool:
        """Whether copies from pinned memory to the model's device are faster."""
        return can_pin_for(self.device)

    @property
    def has_torch_sync_batchnorm(self) -> bool:
        """Whether ``torch.nn.SyncBatchNorm`` works on this model's device."""
        return False


def hooks_of(model: ComputationModel) -> TrainingHooks:
    """Return the hooks of a model, or the defaults if it has none."""
    if isinstance(model, TrainingHooks):
        return model
    defaults = TrainingHooks()
    defaults.device = model.device
    return defaults
