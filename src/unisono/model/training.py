"""What a model may do in its own way when a program trains on it; the defaults leave it to us."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ("TrainingHooks",)


class TrainingHooks:
    """The part of a model's contract that ``training`` asks, so that it never names a backend."""

    device: Any

    def wrap_module(self, module: nn.Module, wrapper: str, **options: Any) -> nn.Module | None:
        """Make a module train on all replicas, in the library's own way.

        Collective over all ranks.

        Args:
            module: on the model's device.
            wrapper: ``"ddp"`` or ``"fsdp"``.
            options: what the user gave to `auto_model` for the wrapper.

        Returns:
            The module, wrapped or as it is, with equal parameters on all ranks; None where the
            library has no such way: for ``"ddp"`` gradients are then averaged through the model's
            own all_reduce.
        """
        return None

    def wrap_optimizer(
        self, optimizer: Optimizer, *, is_averaged: bool, **options: Any
    ) -> Optimizer | None:
        """Adapt an optimizer to the library.

        Local.

        Args:
            optimizer: as the user made it.
            is_averaged: whether backward averages the gradients of its parameters already.
            options: what the user gave to `auto_optim`.

        Returns:
            An optimizer whose ``step`` averages the gradients itself, instead of backward; None
            where there is nothing to adapt, and no option is known.
        """
        return None

    def wrap_loader(self, loader: Any) -> Any:
        """Adapt a data loader to the library, such as one that feeds a device. Local."""
        return loader

    @property
    def can_pin_memory(self) -> bool:
        """Whether copies from pinned memory to the model's device are faster. Local."""
        device: torch.device = self.device
        return device.type == "cuda"

    @property
    def has_torch_sync_batchnorm(self) -> bool:
        """Whether ``torch.nn.SyncBatchNorm`` works on this model's device. Local."""
        return False

    @property
    def flat_buffers(self) -> dict[tuple[torch.dtype, torch.device], Tensor]:
        """Buffers that averaging reuses in this context, one for each dtype and device. Local."""
        found: dict[tuple[torch.dtype, torch.device], Tensor]
        found = self.__dict__.setdefault("_flat_buffers", {})
        return found
