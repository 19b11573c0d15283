"""One job, however its ranks come to exist: results by rank, the first failure, the end of all."""

from __future__ import annotations

import pickle
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from unisono.deadlines import end_of_block, host_s, overdue
from unisono.errors import CollectiveTimeoutError, LaunchError, WorkerFailedError
from unisono.launchers.job.failure import Failure, Failures, Fault, signal_name
from unisono.launchers.job.signals import Orders, handled
from unisono.tracebacks import hides

__tracebackhide__ = hides

T = TypeVar("T")
_DEADLINE_GRACE_S = 0.5  # ranks know more of a deadline that is over: their error comes first
_POLL_S = 1.0  # between two looks at the time


class Ranks(ABC):
    """What a launcher brings: how news of its ranks come, and how the ranks are ended."""

    takes: Sequence[int] = ()
    """Signals that ranks get where this process gets them while it waits, and has no handler."""

    @abstractmethod
    def poll(self, job: Job[Any], until: float) -> None:
        """Wait for news until then at most, and tell them to `job`."""

    @abstractmethod
    def end(self, job: Job[Any]) -> None:
        """End all ranks that still run, within seconds."""
        # A job does this once, unless an exception cuts it short: then it may do it again.

    def signal(self, number: int) -> None:
        """Send all ranks a signal."""
        del number

    def after_signal(self, number: int) -> None:
        """Let a signal that ended the ranks have its way with this process, too."""
        signal.raise_signal(number)

    def see_out(self, job: Job[Any]) -> None:
        """Let ranks end that have given their results, all of them."""
        del job

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Say how a rank ended that left no word."""
        return WorkerFailedError(f"rank {rank} of {job.world_size} is lost", rank)

    def doubt(self, rank: int) -> int:
        """Tell how likely another rank caused the end of one that left no word: 0 or 1."""
        del rank
        return 0

    def why_late(self) -> str:
        """Say what is known of ranks that aren't done at a deadline, for its error."""
        return ""

    def are_starting(self) -> bool:
        """Return whether a rank hasn't been told yet what to do."""
        return False

    def may_start_again(self, job: Job[Any]) -> bool:
        """Return whether a failure isn't the job's, as the launcher may start all ranks again."""
        del job
        return False


class Job(Generic[T]):
    """Ranks that run one function; the handle that ``spawn(join=False)`` returns."""

    # The launcher's `Ranks` tell it what became of each rank: `succeed`, `fail` or `stop`.

    def __init__(
        self,
        ranks: Ranks,
        world_size: int,
        own: Iterable[int] | None = None,
        *,
        grace_s: float | None = None,
    ) -> None:
        self.ranks = ranks
        self.orders: Orders = Orders(grace_s or 0.0)
        self.world_size: int = world_size
        self.results: dict[int, bytes] = {}
        self.failures: Failures = Failures(ranks.doubt)
        self._own = tuple(range(world_size) if own is None else own)
        self._takes = () if grace_s is None else ranks.takes
        self._error: LaunchError | None = None
        self._is_ended = False

    def seat(self, own: Iterable[int], world_size: int) -> None:
        """Begin, or begin again, with these ranks; what became of earlier ones doesn't count."""
        self.world_size = world_size
        self._own = tuple(own)
        self.results.clear()
        self.failures = Failures(self.ranks.doubt)

    @property
    def late(self) -> list[int]:
        """Ranks without a result."""
        if len(self.results) >= len(self._own):
            return []
        return [rank for rank in self._own if rank not in self.results]

    def succeed(self, rank: int, result: bytes) -> None:
        """Take in the pickle of what a rank returned."""
        self.results[rank] = result

    def fail(self, rank: int, fault: Fault | LaunchError | None) -> None:
        """Take in how a rank failed: what it said, who lost it, or None for no word."""
        self.failures.add(rank, fault)

    def take(self, rank: int, outcome: bytes | Failure | LaunchError) -> None:
        """Take in how a rank ended: the pickle of its result, or its failure."""
        if isinstance(outcome, bytes):
            self.succeed(rank, outcome)
        else:
            self.fail(rank, outcome)

    def lose(self, rank: int, how: str, error: Exception) -> None:
        """Take in that a library lost what ran a rank."""
        lost = WorkerFailedError(f"rank {rank} of {self.world_size} is lost, {how}", rank)
        lost.__cause__ = error
        self.fail(rank, lost)

    def stop(self, error: LaunchError) -> None:
        """Let the job fail as a whole, unless it has."""
        self._error = self._error or error

    def join(self, timeout: float | None = None) -> list[T]:
        """Wait for all ranks."""
        # Within ``deadline`` the job has the time that is left there.
        self.finish(timeout)
        return [self._value(rank) for rank in sorted(self.results)]

    def finish(self, timeout: float | None = None) -> None:
        """Wait for all ranks as `join` does, and leave their results as they came."""
        limit = None if timeout is None else time.monotonic() + host_s(timeout)
        try:
            with handled(self._takes, self._obey):
                self._finish(limit)
        except Exception:  # whichever it is, a signal that the ranks died of comes first
            if self.orders.came:
                self.ranks.after_signal(self.orders.came[0])
            raise

    def _finish(self, limit: float | None) -> None:
        try:
            is_over = self._wait(limit)
            if is_over and self._error is None:
                self.ranks.see_out(self)
        except BaseException:  # Ctrl-C above all: nobody is left behind
            self.terminate()
            raise
        if not is_over:
            raise LaunchError(
                f"ranks {self.late} haven't finished in time: join again, or terminate()"
            )
        self.terminate()
        if self._error is not None:
            raise _copy(self._error)

    def is_decided(self, within_s: float) -> bool:
        """Return whether nothing more is to be waited for: all have a result, or one has failed."""
        limit = time.monotonic() + within_s
        while self._error is None and not self.failures and self.late:
            if time.monotonic() >= limit:
                return False
            self._poll(limit)
        return True

    def watch(self, until: float | None) -> None:
        """Take in news of ranks that stay, until then at most."""
        self._poll(until)

    def require_ranks(self) -> None:
        """Raise how a rank ended that was to stay, once that is known; then all have been ended."""
        if self._is_over():
            self._finish(None)

    def send_tasks(self) -> None:
        """Wait until every rank knows what to do, or one has failed."""
        try:
            while self.ranks.are_starting() and not self.failures:
                self._poll(self._require_time(0.0))
                if self._error is not None:
                    raise _copy(self._error)
        except BaseException:  # as in `finish`
            self.terminate()
            raise

    def terminate(self) -> None:
        """End all ranks that still run, within seconds."""
        # Local; does nothing once they have been ended.
        if self._is_ended:
            return
        late = self.late
        if late and self._error is None:
            self._error = self._first_failure() if self.failures else self._was_told_to_end(late)
        self.ranks.end(self)
        self._is_ended = True  # not before: one that Ctrl-C cuts short is made again

    def _wait(self, limit: float | None) -> bool:
        """Wait until the job has failed or succeeded; tell whether it has by the limit."""
        while not self._is_over():
            if self.orders.until is not None:  # which is the limit of those that save
                limit = None
            if limit is not None and time.monotonic() >= limit:
                return False
            self._poll(limit, self._require_time(_DEADLINE_GRACE_S))
        return True

    def _obey(self, number: int, _: Any) -> None:
        """Do what a signal to this process asks for."""
        of_ranks = self.orders.take(number)
        if of_ranks:
            self.ranks.signal(of_ranks)

    def _is_over(self) -> bool:
        """Return whether the job has failed or succeeded; the first failure is asked for once."""
        late = self.late
        if self._error is None and late and self.orders.until is not None:
            is_over = time.monotonic() >= self.orders.until  # some that fail end no others' time
            if is_over or self.failures.by_rank.keys() >= set(late):
                self._error = self._was_told_to_end(late)
        elif self._error is None and late and self._counts_failures():
            has_heard_all = all(self.failures.by_rank.get(rank) for rank in late)
            if has_heard_all or time.monotonic() >= self.failures.decide_at:
                self._error = self._first_failure()
        return self._error is not None or not late

    def _first_failure(self) -> LaunchError:
        """Say who failed first; asked for before anybody is ended by this process."""
        return self.failures.error(self.world_size, partial(self.ranks.lost, self))

    def _counts_failures(self) -> bool:
        return bool(self.failures) and not self.ranks.may_start_again(self)

    def _was_told_to_end(self, late: list[int]) -> WorkerFailedError:
        why = f" by {signal_name(self.orders.came[0])}" if self.orders.came else ""
        return WorkerFailedError(
            f"the job was ended{why} before ranks {late} of {self.world_size} were done", late[0]
        )

    def _poll(self, *limits: float | None) -> None:
        ends = [limit for limit in (*limits, self.orders.until) if limit is not None]
        if self._counts_failures() and self.orders.until is None:
            ends.append(self.failures.decide_at)
        self.ranks.poll(self, min([time.monotonic() + _POLL_S, *ends]))

    def _require_time(self, grace_s: float) -> float | None:
        """Give when the time of the block is over; raise once it is."""
        until = end_of_block()
        if until is None or time.monotonic() < until + grace_s:
            return None if until is None else until + grace_s
        raise CollectiveTimeoutError(overdue(self.late, self.world_size) + self.ranks.why_late())

    def _value(self, rank: int) -> Any:
        try:
            return pickle.loads(self.results[rank])
        except Exception as error:  # a constructor of the user's may raise anything
            raise WorkerFailedError(
                f"rank {rank} of {self.world_size} returned a value that can't be unpickled here: "
                f"{type(error).__name__}: {error}",
                rank,
            ) from error


def _copy(error: LaunchError) -> LaunchError:
    """Copy an error for the caller: raised itself it would hold the job, and the job holds it."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
