"""What a rank has begun on the data plane, so that the others can tell whether it has come."""

from __future__ import annotations

from unisono.control.calls import site

__all__ = ("Steps",)


class Steps:
    """Counts of what was begun, group by group: equal counts are the same operation."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], int] = {}
        """By the ranks of the group, ``()`` for all ranks."""
        self.last: str = ""
        """The last one and its line; empty once something else came after it."""

    def begin(self, ranks: tuple[int, ...], call: str) -> int:
        """Take note of an operation that this rank begins; give its number. Local."""
        self.counts[ranks] = count = self.counts.get(ranks, 0) + 1
        self.last = f"{call} at {site().decode('utf-8', 'replace')}"
        return count
