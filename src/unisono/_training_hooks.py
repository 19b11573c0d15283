"""What a model may do in its own way when a program trains on it; the defaults leave it to us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ("TrainingHooks",)


class TrainingHooks:
    """The part of a model's contract that ``training`` asks, so that it never names a backend."""

    def wrap_module(self, module: nn.Module, wrapper: str, **options: Any) -> nn.Module | None:
        """Make a module train on all replicas, in the library's own way.

        Collective over all ranks.

        Args:
            module: on the model's device.
            wrapper: ``"ddp"`` or ``"fsdp"``.
            options: what the user gave to `auto_model` for the wrapper.

        Returns:
            The module, wrapped or as it is; None where the library has no such way: for ``"ddp"``
            gradients are then averaged through the model's own all_reduce.
        """
        return None

    def wrap_optimizer(
        self, optimizer: Optimizer, *, is_averaged: bool, **options: Any
    ) -> Optimizer | None:
        """Adapt an optimizer to the library.

        Collective over all ranks.

        Args:
            optimizer: as the user made it.
            is_averaged: whether backward averages the gradients of its parameters already.
            options: what the user gave to `auto_optim`.

        Returns:
            An optimizer whose ``step`` averages the gradients itself, so that backward no longer
            does; None where there is nothing to adapt and no option was understood.
        """
        return None

    def wrap_loader(self, loader: Any) -> Any:
        """Adapt a data loader to the library, such as one that feeds a device. Local."""
        return loader

    @property
    def can_pin_memory(self) -> bool:
        """Whether copies from pinned memory to the model's device are faster. Local."""
        device: torch.device = self.device  # type: ignore[attr-defined]
        return device.type not in ("cpu", "mps", "meta") and torch.accelerator.is_available()

    @property
    def has_torch_sync_batchnorm(self) -> bool:
        """Whether ``torch.nn.SyncBatchNorm`` works on this model's device. Local."""
        return False

    def join(self, module: nn.Module) -> Any:
        """Give the library's own context for uneven inputs, None where there is none. Local."""
        return None

    def no_sync(self, module: nn.Module) -> Callable[[], Any] | None:
        """Give what makes the context in which `module` doesn't average, None if nothing. Local."""
        return getattr(module, "no_sync", None)

    @property
    def flat_buffers(self) -> dict[tuple[torch.dtype, torch.device], Tensor]:
        """Buffers that averaging reuses in this context, one for each dtype and device. Local."""
        found: dict[tuple[torch.dtype, torch.device], Tensor]
        found = self.__dict__.setdefault("_flat_buffers", {})
        return found
