"""A bar chart of waiting times by rank, the only use of matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from unisono import plugins
from unisono.errors import ArgumentError
from unisono.observe.waits import Waits

_WIDTH = 0.4
_WIDTH_INCHES, _HEIGHT_INCHES = 7, 4


def draw(what: str, found: Mapping[str, Waits], path: str | os.PathLike[str]) -> None:
    """Draw two bars for each rank: seconds that others waited for it, and that it waited."""
    try:
        make = plugins.load("matplotlib.figure:Figure")
    except ImportError as error:
        raise ArgumentError(
            f"{what} needs matplotlib, which can't be imported ({error}): pip install matplotlib, "
            "or print the table, which has the same figures"
        ) from error
    figure = make(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES * len(found)), layout="constrained")
    places = figure.subplots(len(found), squeeze=False)[:, 0]
    for axes, (name, waits) in zip(places, found.items(), strict=True):
        _draw(axes, f"{name}: " if name else "", waits)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # such as a suffix that it doesn't know
        raise ArgumentError(f"{what}: {os.fspath(path)} can't be written: {error}") from error


def _draw(axes: Any, begin: str, found: Waits) -> None:
    ranks = range(len(found.lost_s))
    left, right = ([rank + side * _WIDTH / 2 for rank in ranks] for side in (-1, 1))
    axes.bar(left, found.lost_s, _WIDTH, label="others waited for it")
    axes.bar(right, found.waited_s, _WIDTH, label="it waited for others")
    axes.locator_params("x", integer=True, min_n_ticks=1)
    axes.set(xlim=(-0.5, len(ranks) - 0.5), xlabel="rank", ylabel="seconds")
    axes.set_title(begin + found.headline)
    axes.legend()
