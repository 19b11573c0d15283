"""For whoever writes a model or tests a program: laws, and what runs them."""

from __future__ import annotations

from unisono.testing.cases import LAWS, Law
from unisono.testing.conformance import Conformance
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
    "LAWS",
    "Conformance",
    "Kept",
    "Law",
    "LawBrokenError",
    "Outcome",
    "Status",
    "check",
    "keep_laws",
    "law_names",
)
