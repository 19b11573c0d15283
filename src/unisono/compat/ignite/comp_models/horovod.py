"""The names of ``ignite.distributed.comp_models.horovod``: the name of its backend."""

from __future__ import annotations

from unisono.compat.ignite.utils import has_hvd_support as has_hvd_support

HOROVOD = "horovod"
