"""The names of ``ignite.distributed.comp_models`` that programs compare backends with."""

from __future__ import annotations

from typing import Any

from unisono.compat.ignite import utils
from unisono.compat.ignite.comp_models import base, horovod, native, xla

__all__ = (
    "base",
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "horovod",
    "native",
    "registered_computation_models",
    "xla",
)


def __getattr__(name: str) -> Any:
    """Answer what ignite has as variables, at the moment when it is asked. Local."""
    if name in utils.VARIABLES:
        return getattr(utils, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
