"""The names of ``ignite.distributed.comp_models`` for comparing backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono import lazy_import as _lazy_import

if TYPE_CHECKING:
    from unisono.compat.ignite.comp_models import (
        base as base,
        horovod as horovod,
        native as native,
        xla as xla,
    )
    from unisono.compat.ignite.utils import (
        has_hvd_support as has_hvd_support,
        has_native_dist_support as has_native_dist_support,
        has_xla_support as has_xla_support,
        registered_computation_models as registered_computation_models,
    )
else:
    _lazy_import.attach(__name__, *_lazy_import.OF_IDIST)
