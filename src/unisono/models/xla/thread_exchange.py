"""Where replicas that are threads of one process meet on the host."""

from __future__ import annotations

from typing import Any, TypeVar

from unisono.control.missing import named
from unisono.control.monitor import Monitor
from unisono.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerFailedError

__all__ = ("MEETING", "Meeting")

T = TypeVar("T")


class Meeting:
    """Where the replicas that are threads of this process meet on the host.

    A graph that a replica launches alone ends the whole process after ten seconds. A replica that
    waits here instead has its own timeout, and knows who hasn't come.
    """

    def __init__(self) -> None:
        self._moved = Monitor()
        self._rounds: dict[str, dict[int, tuple[str, Any]]] = {}
        # How often each rank has joined; one that has left the n-th time may come back.
        self._joined: dict[int, int] = {}
        self._left: dict[int, tuple[int, str]] = {}

    def join(self, rank: int) -> None:
        """Come, or come back after `leave`. Local."""
        with self._moved.lock:
            self._joined[rank] = self._joined.get(rank, 0) + 1

    def leave(self, rank: int, why: str) -> None:
        """Tell replicas that wait for `rank`, now or later, that it won't come. Local."""
        with self._moved.lock:
            self._leave(rank, why)

    def _leave(self, rank: int, why: str) -> None:
        self._left[rank] = (self._joined.get(rank, 0), why)
        self._moved.notify_all()

    def has_left(self, rank: int) -> bool:
        """Tell whether `rank` has left and not come back. Local."""
        return self._is_gone(rank, self._joined.get(rank, 0))

    def _is_gone(self, rank: int, visit: int) -> bool:
        return rank in self._left and self._left[rank][0] >= visit

    def swap(
        self, group: str, ranks: tuple[int, ...], rank: int, call: str, item: T, timeout_s: float
    ) -> list[T]:
        """Bring an item and take everybody's.

        Collective over `ranks`.

        Args:
            group: the name of the group that meets.
            ranks: those of it, ascending; `rank` is one of them.
            rank: who comes.
            call: what it does, for comparison and for messages.
            item: what it brings; the others get the same object.
            timeout_s: how long it waits for the others.

        Returns:
            The items in rank order.

        Raises:
            CollectiveTimeoutError: not all came.
            CollectiveMismatchError: they came for different calls (on every rank).
            PeerFailedError: one that hasn't come has left.
        """
        with self._moved.lock:
            entries = self._rounds.setdefault(group, {})
            entries[rank] = (call, item)
            is_last = len(entries) == len(ranks)
            if is_last:
                del self._rounds[group]
                self._moved.notify_all()
        if not is_last:
            self._wait(entries, ranks, rank, call, timeout_s)
        if len({entries[r][0] for r in ranks}) > 1:
            called = "; ".join(f"rank {r}: {entries[r][0]}" for r in ranks)
            raise CollectiveMismatchError(
                f"the ranks called different things ({called}): make every rank call the same"
            )
        return [entries[r][1] for r in ranks]

    def _wait(
        self,
        entries: dict[int, tuple[str, Any]],
        ranks: tuple[int, ...],
        rank: int,
        call: str,
        timeout_s: float,
    ) -> None:
        def missing() -> list[int]:
            return [r for r in ranks if r not in entries]

        def gone() -> list[int]:
            return [r for r in missing() if self._is_gone(r, self._joined.get(rank, 0))]

        self._moved.wait(lambda: not missing() or gone(), timeout_s)
        with self._moved.lock:
            late, left = missing(), gone()
            if not late:
                return
            del entries[rank]
            if left:
                raise PeerFailedError(
                    f"rank {rank} waited in {call}, but rank {left[0]} {self._left[left[0]][1]}",
                    left[0],
                )
            waited = f"waited {timeout_s:.3g} s in {call}"
            self._leave(rank, f"{waited}, to which {named(late)} never came")
            raise CollectiveTimeoutError(f"{named(late)} never came: rank {rank} {waited}")


# One for each process: an XLA context that somebody else made offers no place to keep it in.
MEETING = Meeting()
