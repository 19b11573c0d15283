"""Draw the picture of the README: some rows of the tables in benchmarks/README.md, as bars.

    python benchmarks/bars.py [--out benchmarks/bars.svg]

Nothing is measured here. To change a figure, run its benchmark with ``--markdown`` and put its
table into that page.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "README.md"
TITLE = "Times faster than a peer in the same run; logarithmic; CPU, one host of 2 cores"
_COLOR, _TEXT = "#4c78a8", "#808080"  # readable on white and on black


@dataclass(frozen=True)
class Row:
    """One line of a table: times are medians as the benchmark printed them, with their unit."""

    work: str
    ours: str
    against: str
    theirs: str
    times_faster: float


@dataclass(frozen=True)
class Bar:
    """Which row is drawn, and how it is called."""

    label: str
    benchmark: str
    ranks: int
    work: str
    against: str


BARS = (
    Bar("64 KB summed", "tensors", 2, "all_reduce of 64 KB", "gloo"),
    Bar("16 MB summed", "tensors", 2, "all_reduce of 16 MB", "gloo"),
    Bar("16 MB summed", "tensors", 2, "all_reduce of 16 MB over Open MPI", "mpi4py"),
    Bar("16 MB broadcast", "tensors", 2, "broadcast of 16 MB", "gloo"),
    Bar(
        "gradients of a ResNet-50",
        "gradients",
        2,
        "161 gradients, beside DDP's buckets over gloo",
        "DDP's buckets over gloo",
    ),
    Bar(
        "DDP step, small conv net",
        "gradients",
        2,
        "step of the conv net of 0.4 M parameters, DDP, our hook",
        "DDP over gloo",
    ),
    Bar("20 metrics averaged", "payloads", 2, "metrics dict of 20 scalars", "mmengine"),
    Bar("barrier", "payloads", 2, "barrier", "mmengine"),
    Bar("4 workers started", "starts", 4, "first spawn", "torchrun"),
    Bar("100 tests on 2 ranks", "sessions", 2, "100 tests on gloo", "MultiProcContinuousTest"),
)


def tables(text: str) -> dict[tuple[str, int], list[Row]]:
    """Read the tables that compare with a peer, by benchmark and number of ranks."""
    found: dict[tuple[str, int], list[Row]] = {}
    rows: list[Row] = []
    for line in text.splitlines():
        heading = re.match(r"\*\*`(\w+)\.py`\*\*.*\branks (\d+)", line)
        if heading:
            rows = found.setdefault((heading[1], int(heading[2])), [])
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) > 4 and re.match(r"\d+\.\d+( |$)", cells[4]):
            ours, theirs = (re.sub(r" \(.*", "", cells[place]) for place in (1, 3))
            rows.append(Row(cells[0], ours, cells[2], theirs, float(cells[4].split()[0])))
    return found


def row_of(bar: Bar, text: str) -> Row:
    """Find the row of a bar; LookupError where the page has none."""
    for row in tables(text).get((bar.benchmark, bar.ranks), []):
        if (row.work, row.against) == (bar.work, bar.against):
            return row
    raise LookupError(f"{PAGE.name} has no row {bar.work!r} against {bar.against!r}")


def draw(bars: list[tuple[str, Row]], out: str) -> None:
    """Draw how many times faster each is, on a logarithmic axis, with both times beside it."""
    matplotlib: Any = importlib.import_module("matplotlib")
    plots = importlib.import_module("matplotlib.figure")
    with matplotlib.rc_context({"svg.hashsalt": "unisono", "font.size": 10}):
        figure = plots.Figure(figsize=(8, 0.42 * len(bars) + 0.7), layout="constrained")
        axes = figure.add_subplot()
        values = [row.times_faster for _, row in bars]
        places = range(len(bars))
        axes.barh(places, values, color=_COLOR, height=0.62)
        axes.set_xscale("log")
        axes.set_xlim(1, 60 * max(values))
        for place, (_, row) in enumerate(bars):
            text = f"{row.times_faster:g} times: {row.ours}, {row.against} {row.theirs}"
            axes.text(row.times_faster * 1.08, place, text, va="center", color=_TEXT)
        axes.set_yticks(places, [label for label, _ in bars], color=_TEXT)
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.minorticks_off()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(_TEXT)
        axes.tick_params(length=0)
        axes.set_title(TITLE, color=_TEXT, loc="left", size=10)
        figure.savefig(out, transparent=True, metadata={"Date": None})


def main() -> int:
    """Draw the picture."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", default=str(PAGE.with_name("bars.svg")))
    text = PAGE.read_text()
    draw([(bar.label, row_of(bar, text)) for bar in BARS], made.parse_args().out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
