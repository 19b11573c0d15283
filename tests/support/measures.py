"""The time of a fault, and a table of the seconds until its error was reported."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import unisono

_PATH = re.compile(r"(/[\w.-]+){3,}")
_IDLE_S = 0.12  # time of `slack`'s job on an idle host of two cores with a running fork server
_MOST_LINES = 20


def slack() -> float:
    """Return a factor for limits, measured now: 2 on an idle host, more on a busy one.

    The measurement starts and ends three ranks. A test calls this once, when it begins.
    """
    begin = time.monotonic()
    unisono.spawn("gloo", abs, nproc_per_node=3)
    return 2.0 * max(1.0, (time.monotonic() - begin) / _IDLE_S)


def says_little(text: str, original: str | None) -> None:
    """Fail if an error has more than 20 lines besides the `original` traceback in it."""
    own = text.replace(original, "") if original else text
    assert len(own.strip().splitlines()) <= _MOST_LINES, own


@dataclass
class Table:
    """Measurements: case, seconds since the fault, the limit, and the error's first line."""

    rows: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    slack: float = 2.0
    """The factor of this test's limits."""

    def add(self, case: str, seconds: float, limit_s: float, named: str) -> None:
        """Keep the slowest measurement of each case, and fail if this one exceeds its limit."""
        known = self.rows.get(case)
        if known is None or known[0] < seconds:
            self.rows[case] = (
                seconds,
                limit_s,
                _PATH.sub("...", " ".join(named.splitlines()[0].split()))[:90],
            )
        limit_s *= self.slack
        assert seconds <= limit_s, f"{case}: {seconds:.2f} s, limit {limit_s:.2f} s"

    def lines(self) -> list[str]:
        head = ["| case | seconds | limit | what the error named |", "|---|---|---|---|"]
        return head + [
            f"| {case} | {seconds:.2f} | {limit:g} | {named.replace('|', '/')} |"
            for case, (seconds, limit, named) in self.rows.items()
        ]


TABLE = Table()
"""The table of this session."""


@dataclass
class Clock:
    """A file for the time of a rank's failure, by the clock that all processes share."""

    path: str

    def strike(self) -> None:
        Path(self.path).write_text(str(time.monotonic()))

    def since(self) -> float:
        return time.monotonic() - float(Path(self.path).read_text())
