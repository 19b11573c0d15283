"""How a rank failed, which of several failures came first, and the parent's error of it."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from unisono.errors import LaunchError, WorkerFailedError

_PRIMARY_WAIT_S = 1.0  # that a failure which another rank may have caused waits for its own
SECONDARY = 3
"""The doubt about a rank that itself says that another one failed."""


class Fault(Protocol):
    """How a rank failed, as its launcher learns it."""

    @property
    def doubt(self) -> int:
        """How likely another rank caused it: 0 if none did; the least of all counts."""

    def error(self, rank: int, world_size: int) -> LaunchError:
        """Make the parent's error of it."""


def signal_name(number: int) -> str:
    """Name a signal, a real-time one by its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_of(code: int) -> int:
    """Return what a shell calls an exit code: 128 and its number for a signal."""
    return code if code >= 0 else 128 - code


@dataclass(frozen=True, slots=True)
class Failure:
    """How a rank failed, in its own words."""

    summary: str
    traceback: str
    exit_code: int | None
    is_secondary: bool
    cause: bytes | None
    line: str = ""

    @property
    def doubt(self) -> int:
        """How likely another rank caused it."""
        return SECONDARY if self.is_secondary else 0

    def error(self, rank: int, world_size: int, who: str = "") -> WorkerFailedError:
        """Make the parent's error of what a rank raised, or `who` else."""
        who = who or f"rank {rank} of {world_size}"
        text = WorkerFailedError.text(who, self.summary, self.line, self.traceback)
        error = WorkerFailedError(text, rank, self.exit_code, traceback=self.traceback)
        if self.cause is not None:
            with contextlib.suppress(Exception):  # the class may not exist here
                error.__cause__ = pickle.loads(self.cause)
        return error


@dataclass(slots=True)
class Failures:
    """The failures of one job, as they come."""

    # A rank's fault is what it said, an error about it, or None where it left no word.

    doubt_of_lost: Callable[[int], int] = lambda _: 0
    by_rank: dict[int, Fault | LaunchError | None] = field(default_factory=dict)
    began_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.by_rank)

    def add(self, rank: int, fault: Fault | LaunchError | None) -> None:
        """Take a failure in; what a rank says counts more than that it is gone."""
        if not self.by_rank:
            self.began_at = time.monotonic()
        if self.by_rank.get(rank) is None:
            self.by_rank[rank] = fault

    @property
    def decide_at(self) -> float:
        """When the first is known, by ``time.monotonic()``: at once, if it is nobody else's."""
        is_primary = any(self._doubt(rank) == 0 for rank in self.by_rank)
        return self.began_at + (0.0 if is_primary else _PRIMARY_WAIT_S)

    @property
    def first(self) -> int:
        """The rank whose failure caused the others, as far as is known."""
        return min(self.by_rank, key=self._doubt)

    def error(self, world_size: int, lost: Callable[[int], LaunchError]) -> LaunchError:
        """Make the parent's error of the first failure."""
        rank = self.first
        fault = self.by_rank[rank]
        if fault is None:
            return lost(rank)
        return fault if isinstance(fault, LaunchError) else fault.error(rank, world_size)

    def _doubt(self, rank: int) -> int:
        fault = self.by_rank[rank]
        if fault is None:
            return self.doubt_of_lost(rank)
        return 0 if isinstance(fault, LaunchError) else fault.doubt
