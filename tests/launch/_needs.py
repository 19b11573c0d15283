"""What must be here for a test, and where it may be missing."""

from __future__ import annotations

import os

import pytest

__all__ = ("require",)


def require(name: str, reason: str | None) -> None:
    """Skip what can't be had here; or fail, where UNISONO_REQUIRE names it."""
    if reason is None:
        return
    if name in os.environ.get("UNISONO_REQUIRE", "").split(","):
        pytest.fail(f"{reason}, but UNISONO_REQUIRE names {name}")
    pytest.skip(reason)
