"""How benchmarks judge and print; the picture of their README shows what its tables say."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("harness")
    del sys.modules["harness"]


@pytest.fixture
def work(harness: Any) -> Callable[..., Any]:
    """Make a work of which ours takes 2 us and the others 30 and 40."""
    rounds = {"ours": (1, 2, 3), "slow": (40, 40, 40), "fast": (29, 30, 31)}
    timings = {name: harness.Timing(times) for name, times in rounds.items()}

    def make(**goals: Any) -> Any:
        return harness.Work("work", timings, **goals)

    return make


def test_a_goal_is_about_the_best_of_the_others(
    harness: Any, work: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for goals, code in (
        ({}, 0),
        ({"goal": 15}, 0),
        ({"goal": 15.1, "bound": "It is the wire."}, 1),
        ({"limit_us": 2}, 0),
        ({"limit_us": 1.9, "goal": 15}, 1),
    ):
        assert harness.ratio_report("Works", [work(**goals)], {}) == code
    said = capsys.readouterr().out
    assert "MISSED: work: 2.000 us, 15.0 times faster than fast; wanted: >= 15.1 times. It" in said
    assert said.count("MISSED") == 2


def test_a_goal_may_be_about_one_of_the_others(work: Callable[..., Any]) -> None:
    slow = work(goal=15.1, peer="slow")
    assert (slow.ratio, slow.is_met, list(slow.others)) == (20, True, ["slow", "fast"])


def test_what_is_printed_for_people_and_for_programs_is_the_same(
    harness: Any, work: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    harness.ratio_report("Works", [work(goal=20)], {"ranks": 2}, how="json")
    told = json.loads(capsys.readouterr().out)["figures"][0]
    assert told["goal"] == {"times": 20, "limit": None, "is_met": False, "bound": ""}
    assert (told["median"], told["quartiles"], told["best"]) == (2, [1.5, 2.5], "fast")
    fast_peer = {"median": 30, "quartiles": [29.5, 30.5], "slow_rounds": 0}
    assert told["peers"]["fast"] == fast_peer
    harness.ratio_report("Works", [work(goal=20)], {"ranks": 2}, how="markdown")
    said = capsys.readouterr().out
    assert "ranks 2" in said.splitlines()[0]
    ours, fast, slow = "2.000 us (1.500..2.500)", "30.0 us (29.5..30.5)", "40.0 us (40.0..40.0)"
    times = "15.0 (12.7..22.0)"
    wanted = ["work", ours, "fast", fast, times, ">= 20 times", "NO", f"slow {slow}"]
    *_, row = said.splitlines()[:5]
    assert row == f"| {' | '.join(wanted)} |"


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


def test_the_figures_of_the_readme_are_those_of_the_tables(bars: Any) -> None:
    readme = " ".join((FOLDER.parent / "README.md").read_text().split())
    text = (FOLDER / "README.md").read_text()
    claims = {
        ("20 metrics averaged", "mmengine"): "averages 20 metrics {} times faster than",
        ("16 MB summed", "gloo"): "sums 16 MB {} times faster than gloo",
        ("4 workers started", "torchrun"): "starts four ranks {} times faster than torchrun",
    }
    for (label, against), claim in claims.items():
        (bar,) = [bar for bar in bars.BARS if (bar.label, bar.against) == (label, against)]
        assert claim.format(f"{bars.row_of(bar, text).times_faster:g}") in readme


def test_a_row_that_is_not_there_is_told(bars: Any) -> None:
    bar = bars.Bar("", "tensors", 2, "all_reduce of nothing", "gloo")
    with pytest.raises(LookupError, match="all_reduce of nothing"):
        bars.row_of(bar, (FOLDER / "README.md").read_text())
