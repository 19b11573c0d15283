"""Ranks of a launcher that have a model of a class, without the facade."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.model.contract import ComputationModel
from unisono.topology import RankInfo


def with_model(
    cls: type[ComputationModel],
    backend: str,
    entry: Callable[[Any], Any],
    options: dict[str, Any],
    info: RankInfo,
) -> Any:
    """Make the model, run `entry` with it, end it."""
    model = cls.initialize(backend, info, **options)
    result = entry(model)
    model.finalize()
    return result
