"""The picture of the README shows what the tables say."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("bars")
    del sys.modules["bars"]


def test_every_bar_is_a_row_and_the_picture_has_its_figures(bars: Any) -> None:
    text = (FOLDER / "README.md").read_text()
    picture = (FOLDER / "bars.svg").read_text()
    shown = re.findall(r"<!-- ([\d.]+) times: (.+?) -->", picture)
    wanted = []
    for bar in bars.BARS:
        row = bars.row_of(bar, text)
        wanted.append((f"{row.times_faster:g}", f"{row.ours}, {row.against} {row.theirs}"))
    assert shown == wanted


def test_a_row_that_is_not_there_is_told(bars: Any) -> None:
    bar = bars.Bar("", "tensors", 2, "all_reduce of nothing", "gloo")
    with pytest.raises(LookupError, match="all_reduce of nothing"):
        bars.row_of(bar, (FOLDER / "README.md").read_text())
