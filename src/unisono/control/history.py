"""The lines that calls were made on, round by round: one call too many on one rank shows there.

Ranks may make the same call on different lines, so lines that differ say nothing. But where they
begin to differ in one round, and in the next one rank is on the line that all others were on
before, while those are on a third, that rank has made a call more, or one less, than they.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unisono.errors import CollectiveMismatchError

__all__ = ("History",)

_log = logging.getLogger(__name__)


class History:
    """The last round of one group in which the lines differed."""

    def __init__(self) -> None:
        self.sites: list[str] | None = None
        """Its lines by place, if they hadn't differed in the round before; None if they agreed."""
        self._swaps: set[frozenset[str]] = set()

    def compare(self, sites: list[str], call: str, ranks: Sequence[int]) -> None:
        """Take note of a round whose lines differ.

        Local.

        Args:
            sites: the line of every rank's call.
            call: what all of them called.
            ranks: their global ranks.

        Raises:
            CollectiveMismatchError: one rank has made one call more, or less, than the others.
        """
        before, self.sites = self.sites, sites if self.sites is None else []
        if not before:
            return
        for place, (old, new) in enumerate(zip(before, sites, strict=True)):
            others = {pair for i, pair in enumerate(zip(before, sites, strict=True)) if i != place}
            if len(others) > 1:
                continue
            their_old, their_new = others.pop()
            is_behind, is_ahead = new == their_old, their_new == old
            if is_behind and is_ahead:
                self._warn(ranks[place], call, old, new)
                return
            if is_behind or is_ahead:
                raise _shifted(ranks[place], is_behind, call, (old, new), (their_old, their_new))

    def _warn(self, rank: int, call: str, one: str, other: str) -> None:
        if frozenset((one, other)) not in self._swaps:
            self._swaps.add(frozenset((one, other)))
            _log.warning(
                "rank %d called %s at %s and then at %s, the other ranks the other way round: "
                "their values were taken together in the order of the calls",
                *(rank, call, one, other),
            )


def _shifted(
    rank: int, is_behind: bool, call: str, own: tuple[str, str], others: tuple[str, str]
) -> CollectiveMismatchError:
    extra, count = (own[0], "more") if is_behind else (others[0], "less")
    return CollectiveMismatchError(
        f"rank {rank} has made one call {count} than the others, probably at {extra}, so what the "
        f"ranks got doesn't belong together:\n"
        f"  rank {rank}: {call} at {own[0]}, then at {own[1]}\n"
        f"  others: {call} at {others[0]}, then at {others[1]}\n"
        "make every rank of the group call the same collectives in the same order; where this is "
        "meant, set UNISONO_DEBUG=0"
    )
