"""One deadline for whatever this thread calls within a block, on every model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Protocol

from unisono._arguments import seconds
from unisono.topology import Group

__all__ = ("Limited", "allowed_s", "deadline", "end_of_block", "limit_of")

_until: ContextVar[float | None] = ContextVar("_until", default=None)


@contextmanager
def deadline(timeout: float | timedelta) -> Iterator[None]:
    """Let collectives of a block, and calls of a pool, be done in time: those that are late raise.

    Local. All that the block's own thread calls shares the one deadline, whatever ``timeout`` the
    job has; a shorter one that holds already stays. A context in which a collective timed out is
    no longer usable, since its ranks are out of step. NCCL's collectives and the graphs that XLA
    has begun keep to the job's ``timeout``.

    Args:
        timeout: seconds or a timedelta, over 0.

    Raises:
        ArgumentError: a bad value.
        CollectiveTimeoutError: from the collective that wasn't done in time.

    Example:
        >>> import unisono as idist
        >>> with idist.deadline(30):
        ...     idist.all_reduce(1)
        1
    """
    until = time.monotonic() + seconds("timeout", timeout).total_seconds()
    outer = _until.get()
    token = _until.set(until if outer is None else min(until, outer))
    try:
        yield
    finally:
        _until.reset(token)


def end_of_block() -> float | None:
    """Give the deadline that holds in this thread, by ``time.monotonic()``; None if none. Local."""
    return _until.get()


class Limited(Protocol):
    """What allows its collectives some time."""

    @property
    def timeout_s(self) -> float | None:
        """Seconds that a collective may take."""


def allowed_s(job: Limited, group: Group | None) -> float | None:
    """Give the seconds that a collective over `group` may take: the group's own, else the job's.

    Local.
    """
    return job.timeout_s if group is None or group.timeout_s is None else group.timeout_s


def limit_of(timeout_s: float | None, until: float | None = None) -> float | None:
    """Give how long a collective may take that starts now in this thread.

    Local.

    Args:
        timeout_s: seconds that the job or the group allows; None for no limit.
        until: the deadline that held where it was started, if that was elsewhere.

    Returns:
        The seconds left until the block's deadline if that is sooner, at least 0.
    """
    here = _until.get()
    if here is None and until is None:
        return timeout_s
    left = max(0.0, min(end for end in (here, until) if end is not None) - time.monotonic())
    return left if timeout_s is None else min(left, timeout_s)
