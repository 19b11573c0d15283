"""The names of ``ignite.distributed.comp_models.xla``: the name of its backend."""

from __future__ import annotations

from unisono.compat.ignite.utils import has_xla_support as has_xla_support

XLA_TPU = "xla-tpu"
