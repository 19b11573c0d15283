"""What ignite has as variables of its modules: asked at each use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ("VARIABLES", "Answer", "answer")

VARIABLES = (
    "has_hvd_support",
    "has_native_dist_support",
    "has_xla_support",
    "registered_computation_models",
)


Answer = Callable[[str], Any]


def answer(module: str, *names: str) -> Answer:
    """Make the ``__getattr__`` of a module that has some of them."""

    def find(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module("unisono"), name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
