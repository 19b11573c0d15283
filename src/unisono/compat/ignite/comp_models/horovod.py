"""The names of ``ignite.distributed.comp_models.horovod``: the name of its backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy_import import attach

if TYPE_CHECKING:
    has_hvd_support: bool

__all__ = ("HOROVOD", "has_hvd_support")

HOROVOD = "horovod"

attach(__name__, "has_hvd_support")
