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
    """An upper bound of a figure.

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
    """Make the command line that all benchmarks have: rounds, and how to print."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=_count, default=rounds, help="default: %(default)s")
    how = made.add_mutually_exclusive_group()
    for name, what in (("json", "JSON"), ("markdown", "a table of Markdown")):
        text = f"print {what} instead of a table"
        how.add_argument(f"--{name}", dest="how", action="store_const", const=name, help=text)
    made.set_defaults(how="table")
    return made


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} should be at least 1")
    return value


HEAD = ("work", "ours", "quartiles", "peer", "peer's", "ratio", "difference", "goal", "met")


def report(
    title: str,
    figures: Sequence[Figure],
    notes: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
    *,
    how: str = "table",
) -> int:
    """Print figures.

    Args:
        title: what was measured.
        figures: the lines.
        notes: sentences below the table.
        facts: what else belongs to the result, such as versions.
        how: ``"table"``, ``"json"`` or ``"markdown"``.

    Returns:
        The exit code: 1 where a goal is missed, else 0.
    """
    if how == "json":
        show_json(title, [figure.as_dict() for figure in figures], facts or {}, notes=list(notes))
    else:
        rows = [_cells(figure) for figure in figures]
        show(title, HEAD, rows, [*notes, *_verdicts(figures)], facts or {}, how=how)
    return int(any(figure.excess > 0 for figure in figures))


def show_json(
    title: str, entries: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], **more: Any
) -> None:
    """Print entries with what was measured, and where, as one line of JSON."""
    print(json.dumps({"title": title, **_about(facts), **more, "figures": entries}))


def show(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    facts: Mapping[str, Any],
    *,
    how: str,
) -> None:
    """Print rows of text as a table, with what was measured above it and notes below."""
    about = ", ".join(f"{name} {value}" for name, value in _about(facts).items())
    if how == "markdown":
        cells = [head, ["---"] * len(head), *rows]
        table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    else:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        table = "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
    print("\n\n".join([f"{title} ({about})", table, *notes]))


def _about(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {"python": platform.python_version(), "cores": os.cpu_count(), **facts}


def _cells(figure: Figure) -> tuple[str, ...]:
    difference, ratio, goal = figure.difference, figure.ratio, figure.goal
    low, high = quartiles(figure.timing)
    cells = [figure.work, f"{short(figure.timing.median)} {figure.unit}"]
    cells.append(f"{short(low)}..{short(high)}")
    if figure.peer_timing is None or difference is None or ratio is None:
        cells += ["", "", "", ""]
    else:
        low, high = quartiles(difference)
        cells += [figure.peer, f"{short(figure.peer_timing.median)} {figure.unit}"]
        cells += [f"{ratio:.3f}", f"{difference.median:+.2f} ({low:+.2f}..{high:+.2f})"]
    if goal is None:
        return (*cells, "", "")
    sign = "over peer <=" if goal.is_difference else "<="
    return (*cells, f"{sign} {goal.limit:g} {figure.unit}", "yes" if figure.excess <= 0 else "NO")


def short(value: float) -> str:
    """Write a number with as many places as one reads."""
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


_RATIO_HEAD = ("work", "ours", "against", "its time", "times faster", "goal", "met", "others")


@dataclass(frozen=True, slots=True)
class Work:
    """What we and others did.

    Args:
        name: what was measured.
        timings: by library, ours first; of the same rounds.
        goal: how many times faster than the peer ours should be; None for no goal.
        limit_us: an upper bound for ours; None for no such goal.
        bound: what bounds our time: what is left to save, and what isn't ours.
        peer: whom ours is compared with; empty for the best of the others.
    """

    name: str
    timings: Mapping[str, Timing]
    goal: float | None = None
    limit_us: float | None = None
    bound: str = ""
    peer: str = ""

    @property
    def ours(self) -> Timing:
        """Our timing."""
        return next(iter(self.timings.values()))

    @property
    def others(self) -> dict[str, Timing]:
        """The peers' timings: first the one that counts, then the best."""
        _, *names = self.timings
        names.sort(key=lambda name: (name != self.peer, self.timings[name].median))
        return {name: self.timings[name] for name in names}

    @property
    def times(self) -> Timing:
        """How many times faster than the peer that counts ours was, round by round."""
        best = next(iter(self.others.values()))
        pairs = zip(self.ours.rounds, best.rounds, strict=True)
        return Timing(tuple(other / mine for mine, other in pairs))

    @property
    def ratio(self) -> float:
        """How many times faster than the peer that counts ours is, by the medians."""
        return next(iter(self.others.values())).median / self.ours.median

    @property
    def goals(self) -> list[str]:
        """What is wanted, in words."""
        wanted = [] if self.goal is None else [f">= {self.goal:g} times"]
        return wanted if self.limit_us is None else [*wanted, f"<= {_time(self.limit_us)}"]

    @property
    def is_met(self) -> bool:
        """Whether no goal is missed."""
        is_fast = self.limit_us is None or self.ours.median <= self.limit_us
        return is_fast and (self.goal is None or self.ratio >= self.goal)

    def as_dict(self) -> dict[str, Any]:
        """Give what ``--json`` prints of it."""
        entry: dict[str, Any] = {
            "work": self.name,
            "unit": "us",
            **_spread(self.ours),
            "rounds": len(self.ours.rounds),
            "peers": {name: _spread(timing) for name, timing in self.others.items()},
            "best": next(iter(self.others)),
            "times": {"median": self.ratio, "quartiles": quartiles(self.times)},
        }
        if self.goals:
            entry["goal"] = {
                "times": self.goal,
                "limit": self.limit_us,
                "is_met": self.is_met,
                "bound": self.bound,
            }
        return entry

    def cells(self) -> tuple[str, ...]:
        """Give its row of the table."""
        (best, timing), *rest = self.others.items()
        low, high = quartiles(self.times)
        return (
            self.name,
            _with_spread(self.ours),
            best,
            _with_spread(timing),
            f"{self.ratio:.1f} ({low:.1f}..{high:.1f})",
            ", ".join(self.goals),
            ("yes" if self.is_met else "NO") if self.goals else "",
            ", ".join(f"{name} {_with_spread(timing)}" for name, timing in rest),
        )


def ratio_report(
    title: str, works: Sequence[Work], facts: Mapping[str, Any], *, how: str = "table"
) -> int:
    """Print our time of each work, every peer's, and how many times faster we are.

    Args:
        title: what was measured.
        works: the lines.
        facts: what else belongs to the result.
        how: ``"table"``, ``"json"`` or ``"markdown"``.

    Returns:
        The exit code: 1 where a goal is missed, else 0.
    """
    if how == "json":
        show_json(title, [work.as_dict() for work in works], facts)
    else:
        notes = [
            f"MISSED: {work.name}: {_time(work.ours.median)}, {work.ratio:.1f} times faster than "
            f"{next(iter(work.others))}; wanted: {', '.join(work.goals)}. {work.bound}".rstrip()
            for work in works
            if not work.is_met
        ]
        show(title, _RATIO_HEAD, [work.cells() for work in works], notes, facts, how=how)
    return int(not all(work.is_met for work in works))


def _spread(timing: Timing) -> dict[str, Any]:
    slow = sum(us > 1.5 * timing.median for us in timing.rounds)
    return {"median": timing.median, "quartiles": quartiles(timing), "slow_rounds": slow}


def _with_spread(timing: Timing) -> str:
    _, size = _unit(timing.median)
    low, high = (short(us / size) for us in quartiles(timing))
    return f"{_time(timing.median)} ({low}..{high})"


def _time(us: float) -> str:
    unit, size = _unit(us)
    return f"{short(us / size)} {unit}"


def _unit(us: float) -> tuple[str, float]:
    return ("s", 1e6) if us >= 1e6 else ("ms", 1e3) if us >= 1e3 else ("us", 1.0)


def plot(works: Sequence[Work], path: str) -> None:
    """Draw every work's times, ours and the peers', as bars on a logarithmic scale."""
    plots = importlib.import_module("matplotlib.figure")
    names = list(dict.fromkeys(name for work in works for name in work.timings))
    figure = plots.Figure(figsize=(10, 0.7 * len(works) + 1.5), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        rows = {row: work.timings[name] for row, work in enumerate(works) if name in work.timings}
        places = [row + i * height for row in rows]
        axes.barh(places, [t.median for t in rows.values()], height=height, label=name)
    axes.set_yticks(
        [row + 0.4 - height / 2 for row in range(len(works))], [work.name for work in works]
    )
    axes.set(xscale="log", xlabel="microseconds a call, median")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path)
