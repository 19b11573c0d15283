"""The names of ``ignite.distributed.auto``."""

from __future__ import annotations

from unisono.training.loading import DistributedProxySampler, auto_dataloader
from unisono.training.wrapping import auto_model, auto_optim

__all__ = ("DistributedProxySampler", "auto_dataloader", "auto_model", "auto_optim")
