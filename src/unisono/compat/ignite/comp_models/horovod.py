"""The names of ``ignite.distributed.comp_models.horovod``: what its backend is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.compat.ignite import utils

if TYPE_CHECKING:
    has_hvd_support: bool

__all__ = ("HOROVOD", "has_hvd_support")

HOROVOD = "horovod"


def __getattr__(name: str) -> Any:
    """Answer what ignite has as a variable, at the moment when it is asked. Local."""
    if name == "has_hvd_support":
        return getattr(utils, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
