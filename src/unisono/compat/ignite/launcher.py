"""The names of ``ignite.distributed.launcher``."""

from __future__ import annotations

from unisono.parallel import Parallel

__all__ = ("Parallel",)
