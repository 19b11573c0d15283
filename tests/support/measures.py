"""When a fault struck, and the table of how long it took until the user knew."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import unisono

_PATH = re.compile(r"(/[\w.-]+){3,}")
_IDLE_S = 0.12  # what that takes on an idle host of two cores, the fork server being there
_MOST_LINES = 20


def slack() -> float:
    """Return by how much a limit may be passed now: 2 on an idle host, more where others use it.

    It is measured: three ranks start, and end. A test asks at its begin.
    """
    begin = time.monotonic()
    unisono.spawn("gloo", abs, nproc_per_node=3)
    return 2.0 * max(1.0, (time.monotonic() - begin) / _IDLE_S)


def says_little(text: str, original: str | None) -> None:
    """Fail for an error of more than 20 lines of its own, which its `original` traceback isn't."""
    own = text.replace(original, "") if original else text
    assert len(own.strip().splitlines()) <= _MOST_LINES, own


@dataclass
class Table:
    """What was measured: case, seconds from the fault, the limit, and what the error named."""

    rows: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    slack: float = 2.0
    """By how much this test may pass a limit."""

    def add(self, case: str, seconds: float, limit_s: float, named: str) -> None:
        """Keep the slowest of those that have one name, and hold it to its limit."""
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
"""That of this session."""


@dataclass
class Clock:
    """A file in which a rank that fails writes when, by the clock that all processes share."""

    path: str

    def strike(self) -> None:
        Path(self.path).write_text(str(time.monotonic()))

    def since(self) -> float:
        return time.monotonic() - float(Path(self.path).read_text())
