"""The names of ``ignite.distributed.comp_models.xla``: what its backend is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.compat.ignite import utils

if TYPE_CHECKING:
    has_xla_support: bool

__all__ = ("XLA_TPU", "has_xla_support")

XLA_TPU = "xla-tpu"


def __getattr__(name: str) -> Any:
    """Answer what ignite has as a variable, at the moment when it is asked. Local."""
    if name == "has_xla_support":
        return getattr(utils, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
