"""The names of ``ignite.distributed.comp_models.native``: the names of its backends."""

from __future__ import annotations

from unisono.compat.ignite.utils import has_native_dist_support as has_native_dist_support

NCCL = "nccl"
GLOO = "gloo"
MPI = "mpi"
