"""The names of ``ignite.distributed.comp_models.native``: what its backends are called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.compat.ignite import utils

if TYPE_CHECKING:
    has_native_dist_support: bool

__all__ = ("GLOO", "MPI", "NCCL", "has_native_dist_support")

NCCL = "nccl"
GLOO = "gloo"
MPI = "mpi"


def __getattr__(name: str) -> Any:
    """Answer what ignite has as a variable, at the moment when it is asked. Local."""
    if name == "has_native_dist_support":
        return getattr(utils, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
