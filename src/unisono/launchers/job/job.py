"""One job of any launcher: results by rank, the first failure, the end of all ranks."""

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

T = TypeVar("T")
_DEADLINE_GRACE_S = 0.5  # for the ranks' own, more precise errors at a deadline
_POLL_S = 1.0  # between two checks of the limits


class JobRanks(ABC):
    """A launcher's ranks: an object that records their outcomes in a job, and ends them."""

    # Signals that are forwarded to ranks while this process waits and has no handler of its own.
    forwarded: Sequence[int] = ()

    @abstractmethod
    def poll(self, job: Job[Any], until: float) -> None:
        """Wait for changes, at most until `until`, and record them in `job`."""

    @abstractmethod
    def end(self, job: Job[Any]) -> None:
        """End all ranks that still run, within seconds."""
        # Called once, and again only after an exception in the first call.

    def signal(self, number: int) -> None:
        """Send all ranks a signal."""
        del number

    def after_signal(self, number: int) -> None:
        """Raise in this process, too, the signal that ended the ranks."""
        signal.raise_signal(number)

    def wait_for_exits(self, job: Job[Any]) -> None:
        """Wait for ranks to exit after all results."""
        del job

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Return the error of a rank that ended without a report."""
        return WorkerFailedError(f"rank {rank} of {job.world_size} is lost", rank)

    def cause_order(self, rank: int) -> int:
        """Return the cause order without a report: 1 if a peer may have ended the rank, else 0."""
        return 0

    def why_late(self) -> str:
        """Return details about late ranks, for the error at a deadline."""
        return ""

    def are_starting(self) -> bool:
        """Return whether a rank's task hasn't been sent yet."""
        return False


class Job(Generic[T]):
    """Ranks that run one function; the handle that ``spawn(join=False)`` returns."""

    # The launcher's `JobRanks` report each rank by `succeed`, `fail` or `stop`.

    def __init__(
        self,
        ranks: JobRanks,
        world_size: int,
        expected: Iterable[int] | None = None,
        *,
        grace_s: float | None = None,
    ) -> None:
        self.ranks = ranks
        self.orders: Orders = Orders(grace_s or 0.0)
        self.world_size: int = world_size
        self.results: dict[int, bytes] = {}
        self.failures: Failures = Failures(ranks.cause_order)
        self._expected = tuple(range(world_size) if expected is None else expected)
        # Without a grace time, a signal ends this process, and the ranks with it.
        self._forwarded = () if grace_s is None else ranks.forwarded
        self._error: LaunchError | None = None
        self._is_ended = False

    @property
    def late(self) -> list[int]:
        """Ranks without a result."""
        if len(self.results) >= len(self._expected):
            return []
        return [rank for rank in self._expected if rank not in self.results]

    def succeed(self, rank: int, result: bytes) -> None:
        """Record the pickle of a rank's result."""
        self.results[rank] = result

    def fail(self, rank: int, fault: Fault | LaunchError | None) -> None:
        """Record a rank's failure: its report, the error of its loss, or None for neither."""
        self.failures.add(rank, fault)

    def record(self, rank: int, outcome: bytes | Failure | LaunchError) -> None:
        """Record a rank's outcome: the pickle of its result, or its failure."""
        if isinstance(outcome, bytes):
            self.succeed(rank, outcome)
        else:
            self.fail(rank, outcome)

    def lose(self, rank: int, how: str, error: Exception) -> None:
        """Record that a library lost a rank's task."""
        lost = WorkerFailedError(f"rank {rank} of {self.world_size} is lost, {how}", rank)
        lost.__cause__ = error
        self.fail(rank, lost)

    def stop(self, error: LaunchError) -> None:
        """Record an error of the whole job; later ones are ignored."""
        self._error = self._error or error

    def join(self, timeout: float | None = None) -> list[T]:
        """Wait for all ranks, within ``deadline`` for its remaining time; return the results."""
        self.finish(timeout)
        return [self._value(rank) for rank in sorted(self.results)]

    def finish(self, timeout: float | None = None) -> None:
        """Wait for all ranks as `join` does, and leave their results pickled."""
        limit = None if timeout is None else time.monotonic() + host_s(timeout)
        try:
            with handled(self._forwarded, self._forward_signal):
                self._finish(limit)
        except Exception:  # a signal that ended the ranks has priority
            if self.orders.received:
                self.ranks.after_signal(self.orders.received[0])
            raise

    def _finish(self, limit: float | None) -> None:
        """Wait for all ranks, end them, and raise the job's error."""
        try:
            is_over = self.is_over_by(limit)
            if is_over and self._error is None:
                self.ranks.wait_for_exits(self)  # a rank may fail: see `_wait_for_peers`
        except BaseException:  # Ctrl-C above all: no rank is left running
            self.terminate()
            raise
        if not is_over:
            raise LaunchError(
                f"ranks {self.late} haven't finished in time: join again, or terminate()"
            )
        self.terminate()
        if self._error is not None:
            raise _copy(self._error)

    def is_over_by(self, limit: float | None) -> bool:
        """Wait until the job has failed or succeeded; return whether it has by the limit."""
        while not self._is_over():
            if self.orders.until is not None:  # ranks that save have the grace time in any case
                limit = None
            if limit is not None and time.monotonic() >= limit:
                return False
            self.poll(limit, self._require_time(_DEADLINE_GRACE_S))
        return True

    def require_ranks(self) -> None:
        """Raise the job's error if a rank has failed or left; all ranks have been ended then."""
        if self._is_over():
            self._finish(None)

    def send_tasks(self) -> None:
        """Wait until every rank has its task, or one has failed."""
        try:
            while self.ranks.are_starting() and not self.failures:
                # No grace time, as a rank without its task reports no error of its own.
                self.poll(self._require_time(0.0))
                if self._error is not None:
                    raise _copy(self._error)
        except BaseException:  # as in `_finish`: no rank is left running
            self.terminate()
            raise

    def terminate(self) -> None:
        """End all ranks that still run, within seconds; a second call does nothing."""
        if self._is_ended:
            return
        late = self.late
        if late and self._error is None:
            self._error = self._first_failure() if self.failures else self._ended_error(late)
        self.ranks.end(self)
        self._is_ended = True  # last, as this method is called again after Ctrl-C

    def _forward_signal(self, number: int, _: Any) -> None:
        """Forward a signal to the ranks, perhaps as SIGKILL."""
        forwarded = self.orders.take(number)
        if forwarded:
            self.ranks.signal(forwarded)

    def _is_over(self) -> bool:
        """Return whether the job has failed or succeeded; choose its error once."""
        late = self.late
        if not late or self._error is not None:
            return True
        now = time.monotonic()
        if self.orders.until is not None:  # a failure leaves the other ranks their time to save
            have_all_failed = self.failures.by_rank.keys() >= set(late)
            if have_all_failed or now >= self.orders.until:
                self._error = self._ended_error(late)
        elif self.failures:
            # A failure waits for other ranks' reports, as one of those may be its cause.
            have_all_reported = all(self.failures.by_rank.get(rank) for rank in late)
            if have_all_reported or now >= self.failures.decide_at:
                self._error = self._first_failure()
        return self._error is not None

    def _first_failure(self) -> LaunchError:
        """Return the error of the first failure; must be called before this process ends a rank."""
        return self.failures.error(self.world_size, partial(self.ranks.lost, self))

    def _ended_error(self, late: list[int]) -> WorkerFailedError:
        why = f" by {signal_name(self.orders.received[0])}" if self.orders.received else ""
        return WorkerFailedError(
            f"the job was ended{why} before ranks {late} of {self.world_size} were done", late[0]
        )

    def poll(self, *limits: float | None) -> None:
        """Wait for changes of ranks, at most until the first limit, and record them."""
        ends = [limit for limit in (*limits, self.orders.until) if limit is not None]
        # After a signal only the grace time decides: see `_is_over`.
        if self.failures and self.orders.until is None:
            ends.append(self.failures.decide_at)
        self.ranks.poll(self, min([time.monotonic() + _POLL_S, *ends]))

    def _require_time(self, grace_s: float) -> float | None:
        """Return the time when the block's deadline is over, if it has one; raise afterwards."""
        until = end_of_block()
        if until is None or time.monotonic() < until + grace_s:
            return None if until is None else until + grace_s
        raise CollectiveTimeoutError(overdue(self.late, self.world_size) + self.ranks.why_late())

    def _value(self, rank: int) -> Any:
        try:
            return pickle.loads(self.results[rank])
        except Exception as error:  # a user's constructor may raise any exception
            raise WorkerFailedError(
                f"rank {rank} of {self.world_size} returned a value that can't be unpickled here: "
                f"{type(error).__name__}: {error}",
                rank,
            ) from error


def _copy(error: LaunchError) -> LaunchError:
    """Copy an error for the caller, as the original's traceback would refer to the job."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
