"""Exchange of items between replicas that are threads of one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from unisono.control.condition import Condition
from unisono.control.signatures import describe
from unisono.deadlines import format_s, host_s, limit_of
from unisono.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailedError,
)
from unisono.topology import named

T = TypeVar("T")
_Round = dict[int, tuple[str, Any]]  # the call and the item of each rank that has arrived


class ThreadExchange:
    """Rounds in which the replicas of one job, threads of this process, exchange items."""

    # A rank that has left is reported at once, and a late rank at the timeout.
    # Protocol of a round of a group, as seen by one of its ranks:
    #   open, from the first rank that arrives --all have arrived--> complete: return all items
    #   open --a missing rank has left, the job has failed, timeout--> withdraw, raise
    # A rank that arrives joins the oldest open round that it isn't in.

    def __init__(self, warn_after_s: float = math.inf) -> None:
        self.warn_after_s: float = warn_after_s
        self.failure: tuple[int, str] | None = None  # rank and text, if the job has failed
        self._condition = Condition()
        self._open: dict[Hashable, list[_Round]] = {}
        # How often each rank has joined.
        self._joined: dict[int, int] = {}
        # How often a rank had joined when it last left, and why it left.
        self._left: dict[int, tuple[int, str]] = {}

    def join(self, rank: int) -> None:
        """Register a rank, also one that has left."""
        with self._condition.lock:
            self._joined[rank] = self._joined.get(rank, 0) + 1

    def leave(self, rank: int, why: str) -> None:
        """Mark `rank` as gone: ranks that wait for it, now or later, raise."""
        with self._condition.lock:
            self._leave(rank, why)

    def _leave(self, rank: int, why: str) -> None:
        self._left[rank] = (self._joined.get(rank, 0), why)
        self._condition.notify_all()

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` has left and not joined again."""
        return self._has_left(rank, self._joined.get(rank, 0))

    def _has_left(self, rank: int, n_joined: int) -> bool:
        return rank in self._left and self._left[rank][0] >= n_joined

    def swap(
        self,
        group: Hashable,
        ranks: tuple[int, ...] | range,
        rank: int,
        call: str,
        item: T,
        timeout_s: float | None,
    ) -> list[T]:
        """Submit an item and return the items of all ranks. Collective over `ranks`."""
        with self._condition.lock:
            self._check(rank, f"reached {call}")
            entries = self._round_of(group, rank)
            entries[rank] = (call, item)
            is_last = len(entries) == len(ranks)
            if is_last:  # closes this round, so that the next call of a rank opens another one
                self._open[group].remove(entries)
                if not self._open[group]:
                    del self._open[group]
                self._condition.notify_all()
        if not is_last:
            missing = lambda: [r for r in ranks if r not in entries]  # noqa: E731
            self._wait(missing, entries, rank, call, timeout_s)
        if len({entries[r][0] for r in ranks}) > 1:
            called = "; ".join(f"rank {r}: {entries[r][0]}" for r in ranks)
            raise CollectiveMismatchError(
                f"the ranks called different things ({called}): make every rank call the same"
            )
        return [entries[r][1] for r in ranks]

    def _round_of(self, group: Hashable, rank: int) -> _Round:
        """Return the oldest open round that `rank` isn't in, or a new one."""
        rounds = self._open.setdefault(group, [])
        for entries in rounds:
            if rank not in entries:
                return entries
        rounds.append({})
        return rounds[-1]

    def _wait(
        self,
        missing: Callable[[], list[int]],
        entries: _Round,
        rank: int,
        call: str,
        timeout_s: float | None,
    ) -> None:
        """Wait until no rank is missing; on failure withdraw from `entries`."""
        given_s = limit_of(timeout_s)
        limit_s = math.inf if given_s is None else given_s
        until = time.monotonic() + host_s(limit_s)
        warn_at = time.monotonic() + host_s(self.warn_after_s)
        while True:
            # The wait also ends for the warning, which is logged without the lock.
            self._condition.wait(
                lambda: not missing() or self.failure or self._gone(missing(), rank),
                min(until, warn_at) - time.monotonic(),
            )
            now = time.monotonic()
            with self._condition.lock:
                late = missing()
                if not late:
                    return
                item = entries[rank][1] if entries else None
                if isinstance(item, bytes):  # a blob's header has the call and the line
                    call = describe(item)
                try:
                    # First, because a failure of the job makes ranks leave.
                    self._check(rank, f"waited in {call}")
                    for peer in self._gone(late, rank):
                        why = f"rank {peer} {self._left[peer][1]}"
                        raise PeerFailedError(f"rank {rank} waited in {call}, but {why}", peer)
                    if now >= until:
                        raise self._time_out(rank, late, call, limit_s)
                except CollectiveError:
                    entries.pop(rank, None)  # the round can't be completed without this rank
                    raise
            if now >= warn_at:
                warn_at = math.inf
                self._warn(rank, late, call)

    def _gone(self, missing: list[int], rank: int) -> list[int]:
        """Return those of the missing ranks that have left."""
        # A peer that left before this rank joined isn't gone: it may join again, as this rank did.
        return [r for r in missing if self._has_left(r, self._joined.get(rank, 0))]

    def _check(self, rank: int, doing: str) -> None:
        """Hook for subclasses: raise if the job has failed. Called with the lock held."""

    def _time_out(
        self, rank: int, late: list[int], call: str, limit_s: float
    ) -> CollectiveTimeoutError:
        """Return the error of a timed-out rank; the lock is held."""
        waited = f"waited {format_s(limit_s)} in {call}"
        # Ranks that wait for this one raise at once, since it doesn't come back.
        self._leave(rank, f"{waited}, which {named(late)} never reached")
        return CollectiveTimeoutError(f"{named(late)} never arrived: rank {rank} {waited}")

    def _warn(self, rank: int, late: list[int], call: str) -> None:
        """Hook for subclasses: log that a rank is still waiting. Called without the lock."""
