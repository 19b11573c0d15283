"""Every law on every model that needs nothing but torch, and on one that a third party ships."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

import unisono as idist
from unisono.testing import Conformance


class TestSerial(Conformance):
    backend = "serial"
    sizes = (1,)


class TestThreads(Conformance):
    backend = "threads"


class TestGloo(Conformance):
    backend = "gloo"


class TestGlooWithShortRounds(Conformance):
    """What is longer than nothing follows on the data plane, which small values else never see."""

    backend = "gloo"
    sizes = (2, 3)

    @pytest.fixture(autouse=True)
    def short_rounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNISONO_INLINE_BYTES", "0")


class TestKvStorePlugin(Conformance):
    backend = "kvstore"
    sizes = (1, 2)

    def test_it_is_found_through_its_entry_point(self) -> None:
        points = entry_points(group="unisono.models", name="kvstore")
        assert points, "install it first: pip install ./tests/plugin (the nox session does)"
        assert "kvstore" in idist.available_backends()

    def test_it_has_at_most_40_lines(self) -> None:
        path = Path(__file__).parents[1] / "plugin/src/unisono_kvstore/__init__.py"
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) <= 40, len(lines)
