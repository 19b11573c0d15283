"""For authors of models and of tests: laws, and what runs them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.testing.cases import LAWS, Law
    from unisono.testing.conformance import Conformance, EnvironmentConformance, LauncherConformance
    from unisono.testing.environments import ENVIRONMENT_LAWS, check_environment
    from unisono.testing.launchers import LAUNCHER_LAWS, check_launcher
    from unisono.testing.runner import (
        Kept,
        LawBrokenError,
        Outcome,
        Status,
        check,
        keep_laws,
        law_names,
    )

__all__ = (
    "ENVIRONMENT_LAWS",
    "LAUNCHER_LAWS",
    "LAWS",
    "Conformance",
    "EnvironmentConformance",
    "Kept",
    "LauncherConformance",
    "Law",
    "LawBrokenError",
    "Outcome",
    "Status",
    "check",
    "check_environment",
    "check_launcher",
    "keep_laws",
    "law_names",
)

_MODULE_OF = {
    **dict.fromkeys(("LAWS", "Law"), "unisono.testing.cases"),
    **dict.fromkeys(
        ("Conformance", "EnvironmentConformance", "LauncherConformance"),
        "unisono.testing.conformance",
    ),
    **dict.fromkeys(("ENVIRONMENT_LAWS", "check_environment"), "unisono.testing.environments"),
    **dict.fromkeys(("LAUNCHER_LAWS", "check_launcher"), "unisono.testing.launchers"),
    **dict.fromkeys(
        ("Kept", "LawBrokenError", "Outcome", "Status", "check", "keep_laws", "law_names"),
        "unisono.testing.runner",
    ),
}


def __getattr__(name: str) -> Any:
    """Load what is asked for, so that pytest's plug-in doesn't wait for torch."""
    if name in _MODULE_OF:
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
