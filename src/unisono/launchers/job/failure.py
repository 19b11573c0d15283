"""How a rank failed, which of several failures came first, and the parent's error of it."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from unisono.errors import LaunchError, WorkerFailedError

__all__ = ("PRIMARY_WAIT_S", "Failure", "Failures")

PRIMARY_WAIT_S = 1.0
"""Seconds that a failure which another rank may have caused waits for that rank's own."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed, in its own words.

    Args:
        summary: type and first line of the exception.
        traceback: its traceback, from the user's own frames on.
        exit_code: of a SystemExit, else None.
        is_secondary: whether it only says that another rank failed.
        cause: cloudpickle of the exception, None if it can't be pickled.
        line: of the user's own code, that it came from; empty if there is none.
    """

    summary: str
    traceback: str
    exit_code: int | None
    is_secondary: bool
    cause: bytes | None
    line: str = ""

    def error(self, rank: int, world_size: int, who: str = "") -> WorkerFailedError:
        """Make the parent's error of what a rank raised, or `who` else. Local."""
        who = who or f"rank {rank} of {world_size}"
        text = WorkerFailedError.text(who, self.summary, self.line, self.traceback)
        error = WorkerFailedError(text, rank, self.exit_code, traceback=self.traceback)
        if self.cause is not None:
            with contextlib.suppress(Exception):  # the class may not exist here
                error.__cause__ = pickle.loads(self.cause)
        return error


@dataclass(slots=True)
class Failures:
    """The failures of one job, as they come.

    A rank's failure is what it said, a peer's error about it, or None where it left no word.

    Args:
        doubt_of_lost: how likely it is that another rank caused the end of one that left no word:
            0 for its own end, 1 for perhaps.
    """

    doubt_of_lost: Callable[[int], int] = lambda _: 0
    by_rank: dict[int, Failure | LaunchError | None] = field(default_factory=dict)
    _began_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.by_rank)

    def add(self, rank: int, failure: Failure | LaunchError | None) -> None:
        """Take a failure in; what a rank says counts more than that it is gone. Local."""
        if not self.by_rank:
            self._began_at = time.monotonic()
        if self.by_rank.get(rank) is None:
            self.by_rank[rank] = failure

    @property
    def decide_at(self) -> float:
        """When the first is known, by ``time.monotonic()``: at once, if it is nobody else's."""
        is_primary = any(self._doubt(rank) == 0 for rank in self.by_rank)
        return self._began_at + (0.0 if is_primary else PRIMARY_WAIT_S)

    @property
    def first(self) -> int:
        """The rank whose failure caused the others, as far as is known."""
        return min(self.by_rank, key=self._doubt)

    def error(
        self, world_size: int, lost: Callable[[int], LaunchError] | None = None
    ) -> LaunchError:
        """Make the parent's error of the first failure.

        Local.

        Args:
            world_size: ranks of the job.
            lost: says how a rank ended that left no word; None where each has said something.
        """
        rank = self.first
        failure = self.by_rank[rank]
        if isinstance(failure, Failure):
            return failure.error(rank, world_size)
        if failure is None:
            assert lost is not None
            return lost(rank)
        return failure

    def _doubt(self, rank: int) -> int:
        failure = self.by_rank[rank]
        if isinstance(failure, Failure):
            return 2 if failure.is_secondary else 0
        return self.doubt_of_lost(rank) if failure is None else 0
