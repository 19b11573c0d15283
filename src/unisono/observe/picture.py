"""A picture of who was waited for and who waited: the one door to matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from unisono.observe.waits import Waits

_WIDTH = 0.4
_WIDTH_INCHES, _HEIGHT_INCHES = 7, 4


def draw(found: Mapping[str, Waits], path: str | os.PathLike[str]) -> None:
    """Draw two bars for each rank: seconds that others waited for it, and that it waited."""
    size = (_WIDTH_INCHES, _HEIGHT_INCHES * len(found))
    figure = Figure(figsize=size, layout="constrained")
    places = figure.subplots(len(found), squeeze=False)[:, 0]
    for axes, (name, waits) in zip(places, found.items(), strict=True):
        _draw(axes, f"{name}: " if name else "", waits)
    figure.savefig(path)


def _draw(axes: Axes, begin: str, found: Waits) -> None:
    ranks = range(len(found.lost_s))
    left, right = ([rank + side * _WIDTH / 2 for rank in ranks] for side in (-1, 1))
    axes.bar(left, found.lost_s, _WIDTH, label="others waited for it")
    axes.bar(right, found.waited_s, _WIDTH, label="it waited for others")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(-0.5, len(ranks) - 0.5)
    axes.set_xlabel("rank")
    axes.set_ylabel("seconds")
    who = "no rank stands out" if found.slowest is None else f"rank {found.slowest} is slow"
    axes.set_title(f"{begin}{found.calls} calls in {found.watched_s:.3g} s: {who}")
    axes.legend()
