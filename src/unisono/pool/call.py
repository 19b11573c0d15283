"""One call of a pool: what its replicas are given, what they answer, and how it ends."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from unisono.errors import LaunchError
from unisono.launchers.job import channel
from unisono.launchers.job.job import Job, Ranks
from unisono.launchers.job.signals import TO_SAVE
from unisono.pool.replicas import Replicas
from unisono.pool.worker import BROKEN
from unisono.tracebacks import hides

__tracebackhide__ = hides

_TICK_S = 0.1  # between two looks at replicas that are busy when another one has failed
_STRIKES = 2  # looks in a row at which one says nothing, or that it waits
_PATIENCE_S = 5.0  # with those that say that they compute
_GRACE_S = 0.2  # for those whose context is lost anyway


class Call(Ranks):
    """Replicas that are given work until nothing is left, and that stay afterwards."""

    takes: Sequence[int] = TO_SAVE

    def __init__(
        self,
        replicas: Replicas,
        give: Callable[[int], bytes | None],
        too_late: Callable[[list[int]], NoReturn],
        limit: float | None,
        *,
        is_together: bool,
    ) -> None:
        self.answers: dict[int, list[bytes]] = {}
        self.replicas_stay: bool = False
        """Whether the call has ended, and all replicas wait for the next one."""
        self._replicas = replicas
        self._give = give
        self._too_late = too_late
        self._limit = limit
        self._is_together = is_together
        self._busy: set[int] = set()
        self._broken_at: float | None = None
        self._is_cut = False

    def begin(self, job: Job[Any]) -> None:
        """Give each replica its first call."""
        for rank in range(job.world_size):
            self._go_on(job, rank)

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait for the next answer, and take it in."""
        limit = None if job.failures else self._limit
        try:
            if not self._hear(job, _sooner(until, limit)) and _is_past(limit):
                self._too_late(job.late)
        except BaseException:  # Ctrl-C, or a replica that died: nobody else is waited for
            self._is_cut = True
            raise

    def signal(self, number: int) -> None:
        """Signal the replicas at work; idle ones have nothing to save."""
        self._replicas.signal(self._busy, number)

    def end(self, job: Job[Any]) -> None:
        """Wait for replicas that still are at work where another one has failed."""
        if job.failures and not self._is_cut:
            with suppress(LaunchError):  # a replica died, after the first failure
                self._drain(job)
        self.replicas_stay = not self._busy and self._broken_at is None

    def _drain(self, job: Job[Any]) -> None:
        """Wait while all that are busy compute: what waits for the failed one waits forever."""
        now = time.monotonic()
        until, look_at = now + _PATIENCE_S, now + _TICK_S
        strikes = dict.fromkeys(self._busy, -1)  # at the first look nobody has been asked yet
        while self._busy:
            at = look_at if self._is_together else None
            if self._broken_at is not None:
                at = self._broken_at + _GRACE_S
            if self._hear(job, _sooner(at, self._limit)):
                continue
            now = time.monotonic()
            if self._broken_at is not None or _is_past(self._limit) or now > until:
                return
            computing = self._replicas.ask(self._busy)
            for rank in self._busy:
                strikes[rank] = 0 if rank in computing else strikes[rank] + 1
            if any(strikes[rank] >= _STRIKES for rank in self._busy):
                return
            look_at = now + _TICK_S

    def _hear(self, job: Job[Any], limit: float | None) -> bool:
        """Take in the next answer; tell whether one came by the limit."""
        heard = self._replicas.hear(self._busy, limit)
        if heard is None:
            return False
        rank, (kind, body) = heard
        if kind == channel.RESULT:
            self.answers.setdefault(rank, []).append(body)
        else:
            job.fail(rank, pickle.loads(body))
        if kind == BROKEN:
            self._broken_at = self._broken_at or time.monotonic()
        self._go_on(job, rank)
        return True

    def _go_on(self, job: Job[Any], rank: int) -> None:
        body = None if job.failures else self._give(rank)
        if body is not None:
            self._busy.add(rank)
            self._replicas.send(rank, body, self._limit)
            return
        self._busy.discard(rank)
        if rank not in job.failures.by_rank:
            job.succeed(rank, b"")


def once(body: bytes, size: int) -> Callable[[int], bytes | None]:
    """Return what gives each of `size` replicas the same call, once."""
    waiting = set(range(size))

    def give(rank: int) -> bytes | None:
        if rank not in waiting:
            return None
        waiting.remove(rank)
        return body

    return give


def _sooner(one: float | None, other: float | None) -> float | None:
    return min((at for at in (one, other) if at is not None), default=None)


def _is_past(limit: float | None) -> bool:
    return limit is not None and time.monotonic() >= limit
