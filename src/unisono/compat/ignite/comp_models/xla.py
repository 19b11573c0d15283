"""The names of ``ignite.distributed.comp_models.xla``: the name of its backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy_import import attach

if TYPE_CHECKING:
    has_xla_support: bool

__all__ = ("XLA_TPU", "has_xla_support")

XLA_TPU = "xla-tpu"

attach(__name__, "has_xla_support")
