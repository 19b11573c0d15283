"""What the pattern of DeepSpeed's tests needs in a conftest."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: Any) -> None:
    """Let a class of the pattern start the ranks of its test in place of running it here."""
    if getattr(item.cls, "is_dist_test", False):
        item.cls()(item._request)
        item.runtest = lambda: True
