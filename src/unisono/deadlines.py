"""Deadlines of blocks: each holds for all calls of its thread, on every model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta

from unisono.arguments import seconds
from unisono.errors import CollectiveTimeoutError
from unisono.topology import Group, boot_id

DEFAULT_TIMEOUT_S = 1800.0
"""Seconds that a collective may take by default, as on torch's gloo."""

_RATE = 1.0  # of the clock of limits and warnings: tests make it faster, or almost stop it

_until: ContextVar[float | None] = ContextVar("_until", default=None)


@contextmanager
def deadline(timeout: float | timedelta) -> Iterator[None]:
    """Set a deadline for a block, after which its collectives, spawns and pool calls raise.

    All calls of the block's own thread share the deadline, whatever ``timeout`` the job has;
    an earlier deadline of an outer block still holds. After a collective has timed out its context
    can't be used any more, because its ranks are out of step. NCCL's collectives, and graphs that
    XLA has begun, keep to the job's ``timeout``.

    Args:
        timeout: seconds or a timedelta, over 0.

    Raises:
        ArgumentError: a bad value.
        CollectiveTimeoutError: raised by the call that wasn't done in time.

    Example:
        >>> import unisono as idist
        >>> with idist.deadline(30):
        ...     idist.all_reduce(1)
        1
    """
    limit_s = seconds("timeout", timeout).total_seconds()
    with _until_sooner(time.monotonic() + host_s(limit_s)):
        yield


@contextmanager
def _until_sooner(until: float) -> Iterator[None]:
    """Set the deadline of a block, unless that of an outer block is sooner."""
    outer = end_of_block()
    token = _until.set(until if outer is None else min(until, outer))
    try:
        yield
    finally:
        _until.reset(token)


@dataclass(frozen=True, slots=True)
class Limit:
    """A block's deadline as it is sent to the replicas that work for it."""

    until: float
    left_s: float
    host: str

    @classmethod
    def here(cls) -> Limit | None:
        """Return the deadline of this thread; None if there is none."""
        until = end_of_block()
        if until is None:
            return None
        return cls(until, max(0.0, until - time.monotonic()), boot_id())


@contextmanager
def within(limit: Limit | None) -> Iterator[None]:
    """Apply a deadline that was set in another process to a block of this thread."""
    if limit is None:
        yield
        return
    until = time.monotonic() + limit.left_s  # the clocks of other hosts differ
    # On one host `limit.until` holds as it is, so the time since it was sent counts, too.
    with _until_sooner(min(until, limit.until) if limit.host == boot_id() else until):
        yield


def end_of_block() -> float | None:
    """Return the deadline of this thread, by ``time.monotonic()``; None if it has none."""
    return _until.get()


def allowed_s(timeout_s: float | None, group: Group | None) -> float | None:
    """Return the timeout of a collective over `group`: the group's own, else the job's."""
    return timeout_s if group is None or group.timeout_s is None else group.timeout_s


def limit_of(timeout_s: float | None) -> float | None:
    """Return the seconds that a collective may take which starts now in this thread.

    Args:
        timeout_s: seconds that the job or the group allows; None for no limit.

    Returns:
        `timeout_s`, or the seconds left until the block's deadline if that is sooner, at least 0.
    """
    until = end_of_block()
    if until is None:
        return timeout_s
    # From seconds of the host's clock to seconds of limits, which tests make faster.
    left_s = max(0.0, until - time.monotonic()) * _RATE
    return left_s if timeout_s is None else min(left_s, timeout_s)


def end_of_call(timeout_s: float | None) -> float:
    """Return the end of a collective that starts now, by ``time.monotonic()``."""
    # By the same limits as `limit_of`; infinity if there is none. Only the timeout is scaled here,
    # as `deadline` has scaled the block's.
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s / _RATE
    end = end_of_block()
    return until if end is None else min(end, until)


def host_s(limit_s: float) -> float:
    """Return the seconds on the host's clock for a limit or warning; they differ only in tests."""
    return limit_s / _RATE


def format_s(seconds: float) -> str:
    """Return seconds as text with their unit, to three digits."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def overdue(late: Sequence[int], world_size: int) -> str:
    """Return the message on ranks that weren't done at the end of a block."""
    return (
        f"the block's deadline is over, and the function wasn't done on ranks {list(late)} of "
        f"{world_size}: they are being ended"
    )


def require_time(late: Sequence[int], world_size: int) -> None:
    """Raise if the deadline of the block has passed.

    Args:
        late: ranks that aren't done.
        world_size: number of ranks of the job.

    Raises:
        CollectiveTimeoutError: the deadline has passed; the message names the ranks.
    """
    until = end_of_block()
    if until is not None and time.monotonic() >= until:
        raise CollectiveTimeoutError(overdue(late, world_size))
