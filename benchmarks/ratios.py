"""Works that should be some times faster than one of several peers: printed and drawn."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Timing, quartiles, short, show, show_json

__all__ = ("Work", "plot", "ratio_report")

HEAD = ("work", "ours", "against", "its time", "times faster", "goal", "met", "others")


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
        show(title, HEAD, [work.cells() for work in works], notes, facts, how=how)
    return int(not all(work.is_met for work in works))


def _spread(timing: Timing) -> dict[str, Any]:
    return {"median": timing.median, "quartiles": quartiles(timing)}


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
