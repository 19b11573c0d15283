"""When a fault struck, and the table of how long it took until the user knew."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ("Clock", "Table")

_PATH = re.compile(r"(/[\w.-]+){3,}")
# On a busy machine the limits are looser; a quiet one passes with 1.
SLACK = float(os.environ.get("UNISONO_FAULTS_SLACK", "4"))


@dataclass
class Table:
    """What was measured: case, seconds from the fault, the limit, and what the error named."""

    rows: dict[str, tuple[float, float, str]] = field(default_factory=dict)

    def add(self, case: str, seconds: float, limit_s: float, named: str) -> None:
        """Keep the slowest of those that have one name, and hold it to its limit."""
        known = self.rows.get(case)
        if known is None or known[0] < seconds:
            self.rows[case] = (
                seconds,
                limit_s,
                _PATH.sub("...", " ".join(named.splitlines()[0].split()))[:90],
            )
        assert seconds <= limit_s * SLACK, f"{case}: {seconds:.2f} s, limit {limit_s} s"

    def lines(self) -> list[str]:
        head = ["| case | seconds | limit | what the error named |", "|---|---|---|---|"]
        return head + [
            f"| {case} | {seconds:.2f} | {limit:g} | {named.replace('|', '/')} |"
            for case, (seconds, limit, named) in self.rows.items()
        ]


@dataclass
class Clock:
    """A file in which whoever fails says when, by the clock that all processes share."""

    path: str

    def strike(self) -> None:
        Path(self.path).write_text(str(time.monotonic()))

    def since(self) -> float:
        return time.monotonic() - float(Path(self.path).read_text())
