"""One call of a pool: its tasks, the replicas' answers, and its end."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from traceback import FrameSummary
from typing import Any

from unisono.errors import LaunchError
from unisono.launchers.job.failure import Failure
from unisono.launchers.job.job import Job, JobRanks
from unisono.launchers.job.signals import TO_SAVE
from unisono.pool.replicas import Replicas
from unisono.pool.worker import ANSWER, BROKEN

_LOOK_S = 0.15  # between two looks at busy replicas after another one has failed
_LOOKS = 2  # so many in a row must find a replica that waits
_PATIENCE_S = 5.0  # with replicas that compute after another one has failed
_Give = Callable[[int], bytes | None]  # returns a rank's next task; None if none is left


class LateError(LaunchError):
    """Raised if a call isn't done at its limit."""


class PoolCall(JobRanks):
    """Replicas that run tasks until none is left, and stay afterwards."""

    forwarded: Sequence[int] = TO_SAVE

    def __init__(
        self, replicas: Replicas, give: _Give, limit: float | None, *, is_together: bool
    ) -> None:
        self.answers: dict[int, list[bytes]] = {}
        self.failures: dict[int, Failure] = {}
        # Busy replicas: after the call, those that were late or waited for a failed one.
        self.busy: set[int] = set()
        self.stacks: dict[int, list[FrameSummary]] = {}  # of busy replicas, once they are read
        self.error: BaseException | None = None  # if neither a failure nor the limit ended it
        self.replicas_stay: bool = False  # whether it has ended, and all replicas are idle
        self.replicas = replicas
        self._give = give
        self._limit = math.inf if limit is None else limit
        self._is_together = is_together  # whether replicas may wait for each other
        # Whether a context can't be used any more; whether the call was left before its end.
        self._is_broken = self._is_cut = False

    @property
    def late(self) -> list[int]:
        """Ranks that weren't done at the limit."""
        return [] if self.failures or self.error else sorted(self.busy)

    def run(self, size: int, grace_s: float | None = None) -> None:
        """Send each replica its first task, and wait until all are done."""
        # Replicas that are threads share this process's signals.
        job: Job[Any] = Job(self, size, grace_s=grace_s if self.replicas.are_processes else None)
        try:
            for rank in range(size):
                self._send_next(job, rank)
            job.finish()
        finally:
            faults = job.failures.by_rank.items()
            self.failures = {rank: fault for rank, fault in faults if isinstance(fault, Failure)}

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait for the next answer, and record it."""
        limit = math.inf if job.failures else self._limit  # a failure is reported before lateness
        try:
            if not self._record_answers(job, min(until, limit)) and time.monotonic() >= limit:
                raise LateError(f"ranks {sorted(self.busy)} weren't done in time")
        except BaseException:  # after Ctrl-C, or a replica's death, the others aren't waited for
            self._is_cut = True
            raise

    def signal(self, number: int) -> None:
        """Signal the replicas at work; idle ones have nothing to save."""
        self.replicas.signal(self.busy, number)

    def end(self, job: Job[Any]) -> None:
        """Wait for busy replicas after another one has failed."""
        if job.failures and not self._is_cut:
            with suppress(LaunchError):  # a replica died, after the first failure
                self._wait_for_others(job)
        self.replicas_stay = not self.busy and not self._is_broken

    def _wait_for_others(self, job: Job[Any]) -> None:
        """Wait until the other replicas are done, or are seen to wait for the failed one."""
        # Replicas that compute end by themselves; those that wait for the failed one never do.
        patience_s = _PATIENCE_S if self._is_together else math.inf
        end, n_looks = min(time.monotonic() + patience_s, self._limit), 0
        while self.busy and time.monotonic() < end and n_looks < _LOOKS:
            if self._record_answers(job, time.monotonic() + _LOOK_S):
                n_looks = 0
            elif self._is_broken:  # the replicas will be replaced in any case
                return
            elif self._is_together:
                n_looks = n_looks + 1 if self.replicas.may_wait(self.busy) else 0

    def _record_answers(self, job: Job[Any], until: float) -> bool:
        """Record the answers that arrive until then, and return whether any has arrived."""
        answers = self.replicas.news(until)
        for rank, kind, body in answers:
            if rank not in self.busy:  # it answers an earlier call, which a debugger delayed
                continue
            if kind == ANSWER:
                self.answers.setdefault(rank, []).append(body)
            else:
                job.fail(rank, pickle.loads(body))
            self._is_broken = self._is_broken or kind == BROKEN
            self._send_next(job, rank)
        return bool(answers)

    def _send_next(self, job: Job[Any], rank: int) -> None:
        """Send a replica its next task; it is done if there is none, or after a failure."""
        body = None if job.failures else self._give(rank)
        if body is not None:
            self.busy.add(rank)
            self.replicas.send(rank, body)
            return
        self.busy.discard(rank)
        if rank not in job.failures.by_rank:
            job.succeed(rank, b"")  # without a result, as `answers` has those of its tasks


def once(body: bytes, ranks: Collection[int]) -> _Give:
    """Return a function that returns the same task once for each of these ranks."""
    tasks = dict.fromkeys(ranks, body)
    return lambda rank: tasks.pop(rank, None)
