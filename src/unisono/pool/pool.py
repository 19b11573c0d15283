"""Warm replicas that run many functions."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from typing_extensions import ParamSpec, Unpack

from unisono.arguments import seconds
from unisono.deadlines import host_s, limit_of
from unisono.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    ContextError,
    LaunchError,
    NotInitializedError,
)
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.lifecycle import check_job, check_stay, interrupted, warn_in_a_rank
from unisono.options import PoolOptions
from unisono.plugins import seats_nodes
from unisono.pool.call import LateError, PoolCall, once
from unisono.pool.replicas import Replicas
from unisono.tracebacks import say_instead

if TYPE_CHECKING:
    from typing_extensions import Self

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
_REFUSED = {
    "join": "its calls wait, its replicas stay",
    "max_nnodes": "all its replicas are on this host",
    "max_restarts": "a call after a failure starts replicas again",
}


class WorkerPool:
    """Replicas that stay, each within its context, and run one function after another.

    The first call starts them. A call starts them again if the last one left the context unusable,
    because a replica died, or waited for one that had failed.

    Args:
        backend: as in ``spawn``.
        nproc_per_node: replicas, at least 1.
        deadline_s: seconds that a call may take; None for no limit. Within ``deadline`` a call has
            the time that is left there, if that is less.
        prefix_output: whether each line that one of several processes prints begins with its rank.
            Lines go where this process's stdout and stderr led when the replicas were made.
        options: as in ``spawn``, except ``join`` and the options about other hosts: all replicas of
            a pool are on this one.

    Raises:
        UnknownBackendError: no model has the backend.
        ArgumentError: a bad value or an unknown option.
        EnvironmentDetectionError: a variable of ours has a bad value.

    Warns:
        UserWarning: this process is rank 0 of several already, as in ``spawn``.

    Example:
        >>> import unisono as idist
        >>> with idist.WorkerPool("threads", nproc_per_node=2) as pool:
        ...     pool.run(lambda local_rank, x: idist.all_reduce(x + local_rank), 10)
        ...     pool.map(abs, [-1, -2, 3])
        [21, 21]
        [1, 2, 3]
    """

    def __init__(
        self,
        backend: str | None = None,
        nproc_per_node: int = 1,
        *,
        deadline_s: float | None = None,
        prefix_output: bool = True,
        **options: Unpack[PoolOptions],
    ) -> None:
        given: dict[str, Any] = {**options}
        _check_options(given)
        cls, plan = check_job("WorkerPool", backend, nproc_per_node, given)
        check_stay(cls, given)
        warn_in_a_rank("WorkerPool", nproc_per_node, given)
        self._size = nproc_per_node
        self._grace_s = plan.grace_s or None  # 0 stands for no grace, as in ``spawn``
        self._deadline_s: float | None = None
        if deadline_s is not None:
            self._deadline_s = seconds("deadline_s", deadline_s).total_seconds()
        self._backend = backend
        self._options = {**given, "prefix_output": prefix_output}
        self._owner = os.getpid()
        self._replicas: Replicas | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "warm" if self.pids else "not started yet"
        limit = "" if self._deadline_s is None else f", deadline_s={self._deadline_s:g}"
        arguments = f"{self._backend!r}, nproc_per_node={self._size}{limit}"
        others = sorted({*self.pids} - {os.getpid()})
        processes = f", processes {', '.join(map(str, others))}" if others else ""
        return f"<WorkerPool({arguments}): {state}{processes}>"

    @property
    def pids(self) -> list[int]:
        """Process id of each replica, by rank; this process's id if they are threads of it.

        Empty while the pool isn't warm.
        """
        replicas = self._replicas
        # A fork can't know whether they have ended, because only the owner receives their reports.
        if replicas is None or (self._owner == os.getpid() and replicas.has_ended()):
            return []
        return replicas.pids

    def run(
        self, fn: Callable[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Run ``fn(local_rank, *args, **kwargs)`` in every replica.

        In the replicas collectives work as under ``spawn``.

        Args:
            fn: any callable, as in ``spawn``.
            args: its positional arguments after the local rank.
            kwargs: its keyword arguments.

        Returns:
            The results, by rank.

        Raises:
            PayloadError: `fn` or its arguments can't be pickled.
            WorkerFailedError: a replica failed; contains the first failure's traceback. The pool
                can be used again.
            CollectiveTimeoutError: the deadline has passed; names the ranks that weren't done.
            NotInitializedError: the pool is closed.
            ContextError: this process is a fork of the one that made the pool.
        """
        self._check_owner()
        body = _pickled(fn, args, kwargs, True)
        with self._lock:
            give = once(body, range(self._size))
            answers = self._collect(give, fn, is_together=True)
            return [pickle.loads(answers[rank][0]) for rank in range(self._size)]

    def map(self, fn: Callable[[U], T], items: Iterable[U]) -> list[T]:
        """Run ``fn(item)`` for every item, each in the next free replica.

        `fn` must not call collectives, since the replicas are at different items.

        Args:
            fn: any callable.
            items: its arguments, one at a time.

        Returns:
            The results, in the order of the items.

        Raises:
            WorkerFailedError: as `run`.
            CollectiveTimeoutError: as `run`; the deadline is that of all items together.
            NotInitializedError: the pool is closed.
            ContextError: as `run`.
        """
        self._check_owner()
        bodies = [_pickled(fn, (item,), {}, False) for item in items]
        with self._lock:
            turns: dict[int, list[int]] = {rank: [] for rank in range(self._size)}
            waiting = iter(range(len(bodies)))

            def give(rank: int) -> bytes | None:
                index = next(waiting, None)
                if index is None:
                    return None
                turns[rank].append(index)
                return bodies[index]

            answers = self._collect(give, fn, is_together=False)
            results: list[Any] = [None] * len(bodies)
            # A replica's answers are in the order of its tasks.
            for rank, indices in turns.items():
                for index, body in zip(indices, answers.get(rank, ()), strict=True):
                    results[index] = pickle.loads(body)
            return results

    def close(self) -> None:
        """End the replicas.

        A second call does nothing, nor does a call in a fork of this process. Waits for the exit
        handlers and non-daemon threads of the replicas; within ``deadline``, only for the time that
        is left there. Replicas that don't answer within 1 s, such as stopped ones, are ended
        without an error.

        Raises:
            WorkerFailedError: a replica failed in its threads or exit handlers.
            CollectiveTimeoutError: the block's deadline is over; the replicas have been ended.
        """
        if self._owner != os.getpid():
            return
        with self._lock:
            self._is_closed = True
            replicas, self._replicas = self._replicas, None
        if replicas is not None and replicas.has_ended():
            replicas.end()
        elif replicas is not None:
            try:
                replicas.close()
            except CollectiveTimeoutError as error:
                raise CollectiveTimeoutError(
                    "the block's deadline is over, but replicas still had threads or exit handlers"
                ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise ContextError(
                f"this process is a fork of process {self._owner}, which made the pool and still "
                "uses it: make another pool here"
            )

    def _ready(self, limit: float | None) -> Replicas:
        """Return idle replicas; start them if there are none, or if one has ended."""
        if self._is_closed:
            raise NotInitializedError("this pool is closed: make another one")
        # `has_ended` misses a replica whose channel a child process holds open, until `watch`.
        if self._replicas is not None and not self._replicas.has_ended():
            self._replicas.watch()
        if self._replicas is not None and self._replicas.has_ended():
            self._drop()
        if self._replicas is None:
            self._replicas = Replicas(self._size, self._backend, self._options, limit)
        return self._replicas

    def _drop(self) -> None:
        """End the replicas, busy or not; the next call starts others."""
        if self._replicas is not None:
            self._replicas.end()
            self._replicas = None

    def _collect(
        self, give: Callable[[int], bytes | None], fn: Any, *, is_together: bool
    ) -> dict[int, list[bytes]]:
        """Send replicas their tasks until none is left; return the answers of each."""
        name = getattr(fn, "__qualname__", fn)
        limit_s = limit_of(self._deadline_s)
        if limit_s == 0:
            raise CollectiveTimeoutError(f"{name} wasn't begun: the block's deadline is over")
        limit = None if limit_s is None else time.monotonic() + host_s(limit_s)
        replicas = self._ready(limit)
        call = PoolCall(replicas, give, limit, is_together=is_together)
        try:
            call.run(self._size, self._grace_s)
        except BaseException as error:
            if not call.replicas_stay:  # else all replicas are idle, and can be used again
                self._drop()
            if isinstance(error, KeyboardInterrupt):
                say_instead(error, interrupted("the call of a pool"))
            if isinstance(error, LateError):
                are = "are ended"
                if not replicas.are_processes:
                    are = "were asked to end, but may still run"
                raise CollectiveTimeoutError(
                    f"{name} wasn't done on ranks {sorted(call.busy)} of {self._size} after "
                    f"{round(limit_s or 0, 2):g} s: their replicas {are}; the next call makes new "
                    "ones"
                ) from None
            raise
        return call.answers


def end_replicas(pool: WorkerPool) -> None:
    """End the replicas of a pool, busy or not; its next call starts others."""
    with pool._lock:
        pool._drop()


def outcome(
    pool: WorkerPool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    limit_s: float | None = None,
    *,
    only: Collection[int] | None = None,
    keep: bool = False,
    on_start: Callable[[PoolCall], object] = lambda _: None,
) -> PoolCall:
    """Run a function in a pool, and return the call with each rank's answer or failure."""
    # For tests and notebooks, which show all failures. For a debugger, `keep` leaves those replicas
    # running that are still busy after another one's failure.
    pool._check_owner()
    body = _pickled(fn, args, {}, True)
    limit = None if limit_s is None else time.monotonic() + limit_s
    ranks = range(pool._size) if only is None else only
    with pool._lock:
        replicas = pool._ready(limit)
        call = PoolCall(replicas, once(body, ranks), limit, is_together=True)
        on_start(call)
        try:
            call.run(pool._size)
        except LaunchError as error:
            # `failures` or `late` reports the error already.
            is_known = call.failures or isinstance(error, LateError)
            call.error = None if is_known else error
        except BaseException:  # Ctrl-C, or another plug-in's limit, leaves the ranks busy
            pool._drop()
            raise
        if call.busy and call.error is None:
            call.stacks = replicas.stacks(call.busy)
        if not call.replicas_stay and not (keep and call.failures):
            pool._drop()  # after their stacks have been read
    return call


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise if options don't suit replicas that stay, or place them on other hosts."""
    for name in {**options, **(options.get("launcher_options") or {})}:
        if name in _REFUSED:
            raise ArgumentError(f"a pool takes no {name}: {_REFUSED[name]}; leave {name} out")
    refused = {name: options[name] for name in ("nnodes", "hosts") if options.get(name) is not None}
    if refused.get("nnodes") == 1:
        del refused["nnodes"]
    if seats_nodes(options.get("launcher")):
        refused["launcher"] = options["launcher"]
    for name, value in refused.items():
        raise ArgumentError(
            f"{name}={value!r}: all replicas of a pool are on this host; leave {name} out, or run "
            "a function on several hosts with spawn()"
        )


def _pickled(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], takes_rank: bool) -> bytes:
    if not callable(fn):
        raise ArgumentError(f"fn should be callable: {fn!r}")
    return pickle_for_worker((fn, args, kwargs, takes_rank))
