"""The names of ``ignite.distributed.comp_models.base``."""

from __future__ import annotations

from unisono.model import ComputationModel

__all__ = ("ComputationModel",)
