"""Sessions of pytest that a test starts, with our plug-in in them."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

__all__ = ("run_session",)

PLUGIN = "unisono.testing.ranks.plugin"


def run_session(pytester: pytest.Pytester, *arguments: str, stdin: bytes = b"") -> pytest.RunResult:
    """Run pytest in a process of its own, in the folder of `pytester`."""
    installed = [point.value for point in entry_points(group="pytest11", name="unisono")]
    load = [] if PLUGIN in installed else ["-p", PLUGIN]
    command = (*pytester._getpytestargs(), *load, "-p", "no:hypothesispytest", *arguments)
    return pytester.run(*command, stdin=stdin)
