"""The names of ``ignite.distributed``: ``import unisono.compat.ignite as idist``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono import lazy_import as _lazy_import

if TYPE_CHECKING:
    from unisono.compat.ignite import (
        auto as auto,
        comp_models as comp_models,
        launcher as launcher,
        utils as utils,
    )
    from unisono.compat.ignite.auto import *  # noqa: F403
    from unisono.compat.ignite.comp_models import native as native, xla as xla
    from unisono.compat.ignite.launcher import *  # noqa: F403
    from unisono.compat.ignite.utils import *  # noqa: F403
else:
    _lazy_import.attach(__name__, *_lazy_import.OF_IDIST)
