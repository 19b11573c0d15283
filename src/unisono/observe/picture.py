"""A picture of who was waited for and who waited: the one door to matplotlib."""

from __future__ import annotations

import os

from matplotlib.figure import Figure

from unisono.observe.waits import Waits

__all__ = ("draw",)

_WIDTH = 0.4
_SIZE_INCHES = (7, 4)


def draw(found: Waits, path: str | os.PathLike[str]) -> None:
    """Draw two bars for each rank: seconds that others waited for it, and that it waited.

    Local.

    Args:
        found: what is drawn.
        path: of the picture.
    """
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    ranks = range(len(found.lost_s))
    left, right = ([rank + side * _WIDTH / 2 for rank in ranks] for side in (-1, 1))
    axes.bar(left, found.lost_s, _WIDTH, label="others waited for it")
    axes.bar(right, found.waited_s, _WIDTH, label="it waited for others")
    axes.set_xticks(ranks)
    axes.set_xlabel("rank")
    axes.set_ylabel("seconds")
    who = "no rank stands out" if found.slowest is None else f"rank {found.slowest} is slow"
    axes.set_title(f"{found.calls} calls in {found.watched_s:.3g} s: {who}")
    axes.legend()
    figure.savefig(path)
