"""Laws for authors of models and launchers, and the functions that check them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono import lazy_import as _lazy_import

if TYPE_CHECKING:
    from unisono.testing.cases import LAWS as LAWS, Law as Law
    from unisono.testing.conformance import (
        Conformance as Conformance,
        EnvironmentConformance as EnvironmentConformance,
        LauncherConformance as LauncherConformance,
    )
    from unisono.testing.environments import (
        ENVIRONMENT_LAWS as ENVIRONMENT_LAWS,
        check_environment as check_environment,
    )
    from unisono.testing.launchers import (
        LAUNCHER_LAWS as LAUNCHER_LAWS,
        check_launcher as check_launcher,
    )
    from unisono.testing.runner import (
        Kept as Kept,
        LawBrokenError as LawBrokenError,
        Outcome as Outcome,
        Status as Status,
        check as check,
        keep_laws as keep_laws,
        law_names as law_names,
    )
else:
    _lazy_import.attach(__name__)  # so that the pytest plug-in loads without torch
