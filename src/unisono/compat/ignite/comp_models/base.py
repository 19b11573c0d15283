"""The names of ``ignite.distributed.comp_models.base``."""

from __future__ import annotations

from unisono.model.contract import ComputationModel as ComputationModel
