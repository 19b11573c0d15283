"""API for authors of launchers: the contract, and a job whose ranks run in other processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import TCPStore

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import LaunchError
from unisono.launchers import local
from unisono.launchers.job.failure import Failure
from unisono.launchers.job.job import Job, JobRanks
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.worker import task_message
from unisono.launchers.job.worker_handles import Workers
from unisono.rendezvous import host_store
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("Future", "Launcher", "RankJob", "RankTask", "host_job")

_CHECK_S = 0.2  # interval at which a `RankTask` checks whether the job is over
_POLL_S = 0.02
_END_S = 10.0  # for tasks to end after their job
_REACH_S = 60.0  # for a `RankTask` to connect to the process that hosts the job
_OVER = "unisono/over"  # the key in the job's store that marks its end


class Launcher(Protocol):
    """Callable that an entry point of the group ``unisono.launchers`` refers to.

    Its own options are further keywords with defaults: users pass them as ``launcher_options``.
    """

    def __call__(
        self,
        entry: Callable[[RankInfo], Any],
        plan: LaunchPlan,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call `entry` once in each process; `plan` gives their number.

        Args:
            entry: called with the process's rank; its exception is the rank's failure.
            plan: the number of ranks, and their rendezvous.
            environ: environment variables to set in each rank, except those that its environment
                already has; None sets none.

        Returns:
            The results of `entry`, by rank.

        Raises:
            PayloadError: `entry` can't be pickled; nothing was started.
            LaunchError: ranks can't be started.
            WorkerFailedError: a rank failed, with its rank, exit code or signal, and traceback; its
                own exception is the ``__cause__``. All other ranks have been ended.
            CollectiveTimeoutError: the deadline of the enclosing ``with deadline(...)`` block has
                passed; all ranks have been ended.
        """


class Future(Protocol):
    """Handle of a submitted task, as in ``concurrent.futures`` and cluster libraries."""

    def done(self) -> bool:
        """Return whether the task has ended."""

    def result(self) -> Any:
        """Return the task's result, or raise its error."""


@dataclass(frozen=True, slots=True, eq=False)
class RankTask:
    """One rank of a job, callable in any process on the machine where the rank is to run.

    Plain pickle can pickle it. It runs the rank in a new process, which ends when the process that
    called the task ends, or when the job does.

    Args:
        info: the rank.
        entry: the rank's function, pickled for a worker.
        environ: variables for the rank, except those that the calling process has already.
        path: ``sys.path`` of the process that hosts the job.
        folder: working directory of that process; the rank uses it too, if its machine has such a
            directory.
        token: value that marks the end of the job in its store.
    """

    info: RankInfo
    entry: bytes = field(repr=False)
    environ: Mapping[str, str] = field(repr=False)
    path: tuple[str, ...] = field(repr=False)
    folder: str
    token: str = field(repr=False)

    def __call__(self) -> bytes:
        """Run the rank, and return its outcome for `RankJob.results`.

        Collective over all ranks of the job. The rank's exceptions aren't raised here.

        Raises:
            LaunchError: no process can be started here, or the process that hosts the job can't be
                reached.
        """
        store = self.reach(_REACH_S)
        with ExitStack() as held:
            workers = Workers(self.info.world_size, held, DEFAULT_TIMEOUT_S)
            job: Job[Any] = Job(workers, self.info.world_size, [self.info.rank])
            try:
                local.begin(workers, [self.info], self._task, held)
                while not job.is_over_by(time.monotonic() + _CHECK_S):
                    if _is_over(store, self.token):
                        # Returned like all failures: a task that raises is treated as a lost rank.
                        error = LaunchError(f"rank {self.info.rank} was ended with its job")
                        return pickle.dumps(error)
                return pickle.dumps(_outcome(job, self.info.rank))
            finally:
                job.terminate()

    def _task(self, info: RankInfo) -> memoryview:
        # Variables that this process has already have priority.
        variables = local.variables_of(info, {**self.environ, **os.environ})
        path = [*sys.path, *(item for item in self.path if item not in sys.path)]
        return task_message(self.entry, info, variables, path, self.folder)

    def reach(self, limit_s: float) -> TCPStore:
        """Connect to the store of the process that hosts the job.

        Raises:
            LaunchError: that process doesn't answer within `limit_s` seconds.
        """
        info = self.info
        assert info.master_addr is not None
        assert info.master_port is not None
        limit = timedelta(seconds=limit_s)
        try:
            return TCPStore(
                info.master_addr, info.master_port, None, is_master=False, timeout=limit
            )
        except RuntimeError as error:
            raise LaunchError(
                f"rank {info.rank} of {info.world_size} can't reach the process that hosts the job "
                f"at {info.master_addr}:{info.master_port}: {error}"
            ) from error


def _is_over(store: TCPStore, token: str) -> bool:
    """Return whether the job is over, or its host process has exited."""
    try:
        # Without `check`, `get` would wait for the key.
        return store.check([_OVER]) and store.get(_OVER) == token.encode()
    except RuntimeError:
        return True


def _outcome(job: Job[Any], rank: int) -> bytes | Failure | LaunchError:
    try:
        job.finish()
    except LaunchError as error:
        failure = job.failures.by_rank.get(rank)
        return failure if isinstance(failure, Failure) else error
    return job.results[rank]


@contextlib.contextmanager
def host_job(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    address: str | None = None,
) -> Iterator[RankJob]:
    """Host a job whose ranks run in other processes: those of a cluster, or an executor's.

    A complete launcher: it submits each task to a separate process and waits::

        def launch(entry, plan, *, environ=None):
            with host_job(entry, plan, environ=environ) as job, executor(plan.world_size) as pool:
                return job.results([pool.submit(task) for task in job.tasks])

    Args:
        entry: as a launcher receives it.
        plan: as a launcher receives it.
        environ: as a launcher receives it.
        address: name or address at which the ranks' machines can reach this one; None if all
            ranks are on this machine.

    Yields:
        The job. Its ranks end when the block ends, or when this process does, however it ends.

    Raises:
        PayloadError: `entry` can't be pickled.
        LaunchError: this process can't listen.
    """
    pickled = pickle_for_worker(entry)
    token, path, folder = secrets.token_hex(16), tuple(search_path()), os.getcwd()
    # This process hosts the store, as node 0 would, whichever node the plan is for.
    with host_store(replace(plan, node_rank=0), address) as hosted:
        local_ranks = range(plan.nproc_per_node)
        nodes = [replace(hosted, node_rank=node) for node in range(plan.nnodes)]
        infos = [node.info(local_rank) for node in nodes for local_rank in local_ranks]
        variables = dict(environ or {})
        tasks = [RankTask(info, pickled, variables, path, folder, token) for info in infos]
        job = RankJob(tasks)
        try:
            yield job
        finally:
            job.end()


class RankJob:
    """A job whose ranks are tasks in other processes.

    Args:
        tasks: the ranks, in order; call each once, all at the same time.
    """

    def __init__(self, tasks: Sequence[RankTask]) -> None:
        self.tasks: tuple[RankTask, ...] = tuple(tasks)
        self._is_over = False

    def results(self, futures: Sequence[Future]) -> list[Any]:
        """Wait for all ranks.

        The first failure ends the wait; then the other ranks are ended, and the tasks with
        them.

        Args:
            futures: the tasks' futures, in order; futures of ``concurrent.futures``, dask and
                similar libraries all work.

        Returns:
            The results of `entry`, by rank.

        Raises:
            WorkerFailedError: a rank failed, or its task was lost.
            LaunchError: a rank can't be started.
            CollectiveTimeoutError: the deadline of the enclosing ``with deadline(...)`` block has
                passed.
        """
        if len(futures) != len(self.tasks):
            raise LaunchError(f"{len(futures)} futures for {len(self.tasks)} ranks")
        job: Job[Any] = Job(_Tasks(futures, self.end), len(self.tasks))
        return job.join()

    def end(self) -> None:
        """End the job on all ranks; a second call does nothing.

        Every rank ends within seconds.
        """
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(LaunchError, RuntimeError):  # the store has ended already
                self.tasks[0].reach(_END_S).set(_OVER, self.tasks[0].token)


class _Tasks(JobRanks):
    """Ranks that are tasks of another library, known by their futures."""

    def __init__(self, futures: Sequence[Future], end_job: Callable[[], None]) -> None:
        self._futures = futures
        self._waiting = dict(enumerate(futures))  # by rank, until their outcomes are recorded
        self._end_job = end_job

    def poll(self, job: Job[Any], until: float) -> None:
        for rank in [rank for rank, future in self._waiting.items() if future.done()]:
            self._record(job, rank, self._waiting.pop(rank))
        # Polled, since futures of different libraries have no common way to wait for several.
        time.sleep(max(0.0, min(_POLL_S, until - time.monotonic())))

    def end(self, job: Job[Any]) -> None:
        """Mark the job as over, and wait for its tasks to end."""
        self._end_job()
        limit = time.monotonic() + _END_S
        while time.monotonic() < limit and not all(future.done() for future in self._futures):
            time.sleep(_POLL_S)

    def _record(self, job: Job[Any], rank: int, future: Future) -> None:
        try:
            job.record(rank, pickle.loads(future.result()))
        except Exception as error:  # the library may raise anything if a process is gone
            job.lose(rank, f"its task ended with {type(error).__name__}: {error}", error)
