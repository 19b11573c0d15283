"""The names of ``ignite.distributed.comp_models.native``: the names of its backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy_import import attach

if TYPE_CHECKING:
    has_native_dist_support: bool

__all__ = ("GLOO", "MPI", "NCCL", "has_native_dist_support")

NCCL = "nccl"
GLOO = "gloo"
MPI = "mpi"

attach(__name__, "has_native_dist_support")
