"""For authors of models and of tests: laws, and what runs them."""

from __future__ import annotations

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
