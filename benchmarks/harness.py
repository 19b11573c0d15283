"""What all benchmarks share: interleaved timing, figures with goals, and how they are printed.

A figure is worth something only beside its peer, measured in the same process at the same time.
So the callables take turns in every round, the order turns with the round, and what is reported
is the median over the rounds and the quartiles around it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = (
    "Figure",
    "Goal",
    "Timing",
    "interleave",
    "parser",
    "plot_ratios",
    "quartiles",
    "ratio_report",
    "report",
    "warm_up",
)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one call took, round by round.

    Args:
        rounds: microseconds a call, one value for each round.
    """

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Microseconds a call, the median over the rounds."""
        return statistics.median(self.rounds)

    def over(self, peer: Timing) -> Timing:
        """Give the differences to a peer, round by round."""
        pairs = zip(self.rounds, peer.rounds, strict=True)
        return Timing(tuple(mine - other for mine, other in pairs))


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure shall not be above.

    Args:
        limit: in the figure's unit.
        is_difference: whether the difference to the peer is meant, else the figure itself.
        bound: what bounds the figure: what is left to save, and what isn't ours.
    """

    limit: float
    is_difference: bool = False
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table.

    Args:
        work: what was measured.
        timing: ours.
        peer: name of the peer.
        peer_timing: the peer's, of the same rounds.
        goal: None where the figure is only shown.
        unit: of all the times.
    """

    work: str
    timing: Timing
    peer: str = ""
    peer_timing: Timing | None = None
    goal: Goal | None = None
    unit: str = "us"

    @property
    def difference(self) -> Timing | None:
        """Ours over the peer's, round by round."""
        return None if self.peer_timing is None else self.timing.over(self.peer_timing)

    @property
    def ratio(self) -> float | None:
        """Ours to the peer's: the ratio of the medians."""
        return None if self.peer_timing is None else self.timing.median / self.peer_timing.median

    @property
    def judged(self) -> Timing:
        """What the goal is about."""
        difference = self.difference
        if self.goal is not None and self.goal.is_difference and difference is not None:
            return difference
        return self.timing

    @property
    def excess(self) -> float:
        """By how much the goal is missed; 0 or below where it is met or where there is none."""
        return 0.0 if self.goal is None else self.judged.median - self.goal.limit

    def as_dict(self) -> dict[str, Any]:
        """Give what ``--json`` prints of it."""
        low, high = quartiles(self.timing)
        entry: dict[str, Any] = {
            "work": self.work,
            "unit": self.unit,
            "median": self.timing.median,
            "quartiles": [low, high],
            "rounds": len(self.timing.rounds),
        }
        if self.peer_timing is not None and self.difference is not None:
            entry["peer"] = {
                "name": self.peer,
                "median": self.peer_timing.median,
                "quartiles": quartiles(self.peer_timing),
            }
            entry["ratio"] = self.ratio
            entry["difference"] = {
                "median": self.difference.median,
                "quartiles": quartiles(self.difference),
            }
        if self.goal is not None:
            entry["goal"] = {
                "limit": self.goal.limit,
                "of": "difference" if self.goal.is_difference else "median",
                "is_met": self.excess <= 0,
                "excess": max(self.excess, 0.0),
                "bound": self.goal.bound,
            }
        return entry


def warm_up(callables: Mapping[str, Callable[[], object]], calls: int) -> None:
    """Call everything a few times, so that what happens only once is over by the first round."""
    for call in callables.values():
        for _ in range(calls):
            call()


def interleave(
    rounds: int, callables: Mapping[str, Callable[[], object]], calls: int = 1000
) -> dict[str, Timing]:
    """Time callables in turns.

    Collective where the callables are: every rank calls them in the same order, equally often.

    Args:
        rounds: how often each has its turn.
        callables: by name; called without arguments.
        calls: calls in one turn, timed as a whole.

    Returns:
        Microseconds a call by name, the loop around the calls included. One call more opens each
        turn and isn't timed.
    """
    names = list(callables)
    samples: dict[str, list[float]] = {name: [] for name in names}
    warm_up(callables, min(calls, 100))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for i in range(rounds):
            first = i % len(names)
            for name in (*names[first:], *names[:first]):
                samples[name].append(_turn(callables[name], calls))
    finally:
        if was_enabled:
            gc.enable()
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def _turn(call: Callable[[], object], calls: int) -> float:
    call()  # brings the ranks together, which left the turn before at different times
    turns = range(calls)
    start = time.perf_counter_ns()
    for _ in turns:
        call()
    return (time.perf_counter_ns() - start) / calls / 1000


def quartiles(timing: Timing) -> tuple[float, float]:
    """Give the first and third quartile over the rounds."""
    if len(timing.rounds) < 2:
        return timing.median, timing.median
    low, _, high = statistics.quantiles(timing.rounds, n=4, method="inclusive")
    return low, high


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """Make the command line that all benchmarks have: ``--rounds`` and ``--json``."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=_count, default=rounds, help="default: %(default)s")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} should be at least 1")
    return value


def report(
    title: str,
    figures: Sequence[Figure],
    notes: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Print figures as a table or as JSON.

    Args:
        title: what was measured.
        figures: the lines.
        notes: sentences below the table.
        facts: what else belongs to the result, such as versions.
        as_json: whether to print JSON.

    Returns:
        The exit code: 1 where a goal is missed, else 0.
    """
    about = {"python": platform.python_version(), "cores": os.cpu_count(), **(facts or {})}
    if as_json:
        entries = [figure.as_dict() for figure in figures]
        print(json.dumps({"title": title, **about, "notes": list(notes), "figures": entries}))
    else:
        print(f"{title} ({', '.join(f'{name} {value}' for name, value in about.items())})\n")
        print(_table(figures))
        for note in (*notes, *_verdicts(figures)):
            print(f"\n{note}")
    return int(any(figure.excess > 0 for figure in figures))


def _table(figures: Sequence[Figure]) -> str:
    head = ("work", "ours", "quartiles", "peer", "peer's", "ratio", "difference", "goal", "met")
    rows = [head, *(_cells(figure) for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    is_text = [i in (0, 3, 7, 8) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, is_text, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _cells(figure: Figure) -> tuple[str, ...]:
    difference, ratio, goal = figure.difference, figure.ratio, figure.goal
    low, high = quartiles(figure.timing)
    cells = [figure.work, f"{_short(figure.timing.median)} {figure.unit}"]
    cells.append(f"{_short(low)}..{_short(high)}")
    if figure.peer_timing is None or difference is None or ratio is None:
        cells += ["", "", "", ""]
    else:
        low, high = quartiles(difference)
        cells += [figure.peer, f"{_short(figure.peer_timing.median)} {figure.unit}"]
        cells += [f"{ratio:.3f}", f"{difference.median:+.2f} ({low:+.2f}..{high:+.2f})"]
    if goal is None:
        return (*cells, "", "")
    sign = "over peer <=" if goal.is_difference else "<="
    return (*cells, f"{sign} {goal.limit:g} {figure.unit}", "yes" if figure.excess <= 0 else "NO")


def _short(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _verdicts(figures: Sequence[Figure]) -> list[str]:
    lines = []
    for figure in figures:
        if figure.goal is None or figure.excess <= 0:
            continue
        lines.append(
            f"MISSED: {figure.work}: {figure.judged.median:.2f} {figure.unit}, "
            f"{figure.excess:.2f} {figure.unit} above the goal of {figure.goal.limit:g}. "
            f"{figure.goal.bound}".rstrip()
        )
    return lines


Found = Mapping[str, tuple[float, Mapping[str, Timing]]]


def ratio_report(
    title: str, found: Found, facts: Mapping[str, Any], *, as_json: bool = False
) -> int:
    """Print for each work our time, every peer's, and how many times faster than the best we are.

    Args:
        title: what was measured.
        found: for each work how many times faster ours shall be, and the timings, ours first.
        facts: what else belongs to the result.
        as_json: whether to print JSON.

    Returns:
        The exit code: 1 where a goal is missed, else 0.
    """
    rows = [_ratio_row(work, goal, timings) for work, (goal, timings) in found.items()]
    about = {"python": platform.python_version(), "cores": os.cpu_count(), **facts}
    if as_json:
        print(json.dumps({"title": title, **about, "figures": rows}))
    else:
        print(f"{title} ({', '.join(f'{name} {value}' for name, value in about.items())})\n")
        for row in rows:
            peers = ", ".join(f"{name} {_short(us)}" for name, us in row["peers"].items())
            verdict = "yes" if row["is_met"] else "NO"
            print(
                f"{row['work']:32} {_short(row['ours']):>9} us   {row['times']:6.1f} times faster "
                f"than {row['best']} (goal {row['goal']:g}: {verdict})   us: {peers}"
            )
    return int(not all(row["is_met"] for row in rows))


def _ratio_row(work: str, goal: float, timings: Mapping[str, Timing]) -> dict[str, Any]:
    ours, *names = timings
    best = min(names, key=lambda name: timings[name].median)
    times = timings[best].median / timings[ours].median
    return {
        "work": work,
        "ours": timings[ours].median,
        "quartiles": quartiles(timings[ours]),
        "peers": {name: timings[name].median for name in names},
        "best": best,
        "times": times,
        "goal": goal,
        "is_met": times >= goal,
    }


def plot_ratios(found: Found, path: str) -> None:
    """Draw every work's times, ours and the peers', as bars on a logarithmic scale."""
    plots = importlib.import_module("matplotlib.figure")
    names = list(dict.fromkeys(name for _, timings in found.values() for name in timings))
    figure = plots.Figure(figsize=(10, 0.7 * len(found) + 1.5), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [row + i * height for row, (_, t) in enumerate(found.values()) if name in t]
        widths = [t[name].median for _, t in found.values() if name in t]
        axes.barh(places, widths, height=height, label=name)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(found))], list(found))
    axes.set(xscale="log", xlabel="microseconds a call, median")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path)
