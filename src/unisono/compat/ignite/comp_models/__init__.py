"""The names of ``ignite.distributed.comp_models`` that programs compare backends with."""

from __future__ import annotations

from unisono.compat.ignite.comp_models import base, horovod, native, xla
from unisono.compat.ignite.variables import VARIABLES, Answer, answer

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

__getattr__: Answer = answer(__name__, *VARIABLES)
