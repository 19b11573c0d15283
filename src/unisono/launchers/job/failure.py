"""Failures of ranks: which of several was the first, and the parent's error for that one."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from unisono.errors import LaunchError, WorkerFailedError

_PRIMARY_WAIT_S = 1.0  # how long a failure waits for the report of its possible cause
SECONDARY = 3  # the cause order of a rank that reports another one's failure itself


class Fault(Protocol):
    """A rank's failure, as known to its launcher."""

    @property
    def cause_order(self) -> int:
        """Order of causes, lowest first: 0 for a rank's own failure, more for a consequence."""

    def error(self, rank: int, world_size: int) -> LaunchError:
        """Return the parent's error for this failure."""


def chain(error: BaseException | None, *, with_contexts: bool = False) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once, as users may set causes in a cycle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (error.__context__ if with_contexts else None)


def signal_name(number: int) -> str:
    """Return a signal's name, or a text with its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_of(code: int) -> int:
    """Return an exit code as a shell reports it: 128 plus the number for a signal."""
    return code if code >= 0 else 128 - code


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's failure, as the rank itself reports it."""

    summary: str
    traceback: str
    exit_code: int | None
    is_secondary: bool
    cause: bytes | None
    line: str = ""

    @property
    def cause_order(self) -> int:
        """Order of causes, as in `Fault`."""
        return SECONDARY if self.is_secondary else 0

    def error(self, rank: int, world_size: int, who: str = "") -> WorkerFailedError:
        """Return the parent's error for a rank's exception, or for that of `who`."""
        who = who or f"rank {rank} of {world_size}"
        text = WorkerFailedError.text(who, self.summary, self.line, self.traceback)
        error = WorkerFailedError(text, rank, self.exit_code, traceback=self.traceback)
        if self.cause is not None:
            with contextlib.suppress(Exception):  # the class may not exist here
                error.__cause__ = pickle.loads(self.cause)
        return error


@dataclass(slots=True)
class Failures:
    """The failures of one job, as they arrive."""

    order_of_lost: Callable[[int], int]
    by_rank: dict[int, Fault | LaunchError | None] = field(default_factory=dict)  # None: no report
    began_at: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.by_rank)

    def add(self, rank: int, fault: Fault | LaunchError | None) -> None:
        """Record a failure; a rank's own report replaces a failure without one."""
        if not self.by_rank:
            self.began_at = time.monotonic()
        if self.by_rank.get(rank) is None:
            self.by_rank[rank] = fault

    @property
    def decide_at(self) -> float:
        """``time.monotonic()`` when the first failure is chosen: at once if one is a rank's own."""
        is_primary = any(self._cause_order(rank) == 0 for rank in self.by_rank)
        return self.began_at + (0.0 if is_primary else _PRIMARY_WAIT_S)

    @property
    def first(self) -> int:
        """The rank whose failure caused the others, as far as is known."""
        return min(self.by_rank, key=self._cause_order)

    def error(self, world_size: int, lost: Callable[[int], LaunchError]) -> LaunchError:
        """Return the parent's error for the first failure."""
        rank = self.first
        fault = self.by_rank[rank]
        if fault is None:
            return lost(rank)
        return fault if isinstance(fault, LaunchError) else fault.error(rank, world_size)

    def _cause_order(self, rank: int) -> int:
        fault = self.by_rank[rank]
        if fault is None:
            return self.order_of_lost(rank)
        return 0 if isinstance(fault, LaunchError) else fault.cause_order
