"""What the ranks have called: how many operations of the data plane, and on which lines."""

from __future__ import annotations

from collections import defaultdict

from unisono.control.calls import site
from unisono.control.history import History

__all__ = ("Steps",)


class Steps:
    """What was called in each group, by its name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        """Operations of the data plane that this rank began: equal counts are the same one."""
        self.last: str = ""
        """The last of them and its line; empty once something else came after it."""
        self.histories: defaultdict[str, History] = defaultdict(History)
        """The lines of rounds in which all ranks said what they call."""

    def begin(self, group: str, call: str) -> int:
        """Take note of an operation that this rank begins; give its number. Local."""
        self.counts[group] = count = self.counts.get(group, 0) + 1
        self.last = f"{call} at {site().decode('utf-8', 'replace')}"
        return count
