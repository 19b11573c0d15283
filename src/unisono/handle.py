"""Handles of operations under way, and the thread that carries those without a better one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ("BACKGROUND", "Background", "Handle", "joined")

BACKGROUND = "unisono-background"
"""What the names of threads begin with that carry operations under way."""
T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """An operation under way.

    Args:
        wait: blocks until the operation is done; gives its value or raises its error.
        is_completed: whether `wait` would return at once.
    """

    __slots__ = ("_is_completed", "_outcome", "_wait")

    def __init__(self, wait: Callable[[], T], is_completed: Callable[[], bool]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._is_completed = is_completed
        self._outcome: Future[T] = Future()

    def wait(self) -> T:
        """Wait for the operation.

        Local: the collective part was started when the handle was made.

        Returns:
            What the blocking form would have returned; the same object at every call.

        Raises:
            UnisonoError: whatever the blocking form would have raised, at every call.
        """
        if self._wait is not None:
            wait, self._wait = self._wait, None
            try:
                self._outcome.set_result(wait())
            except BaseException as error:  # kept, so that every later call raises it again
                self._outcome.set_exception(error)
        return self._outcome.result()

    def is_completed(self) -> bool:
        """Tell whether `wait` would return at once.

        Local.

        Returns:
            True once the operation is done or has failed.
        """
        return self._outcome.done() or (self._wait is not None and self._is_completed())

    def then(self, finish: Callable[[T], U]) -> Handle[U]:
        """Give a handle whose value is `finish` of this one's.

        Local.

        Args:
            finish: called once, in the thread that waits.

        Returns:
            A new handle; wait for that one only.
        """
        return Handle(lambda: finish(self.wait()), self.is_completed)


_Calls = SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


def joined(outer: Handle[Handle[T]]) -> Handle[T]:
    """Make one handle of an operation that is started by another one. Local."""

    def is_completed() -> bool:
        if not outer.is_completed():
            return False
        try:
            return outer.wait().is_completed()
        except Exception:  # which `wait` raises again
            return True

    return Handle(lambda: outer.wait().wait(), is_completed)


class Background:
    """One thread that runs calls in the order in which they were given.

    A model's collectives must start in the same order on every rank, so there is one thread for
    each context, and whoever wants to call the model directly waits for `settle` first. The thread
    ends when nobody has this object any more and all calls are done.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._last: Future[Any] | None = None
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable[[], T]) -> Handle[T]:
        """Queue a call.

        Local. One that a queued call makes is part of it, and runs at once: at the end of the queue
        its place among the others would differ from rank to rank.

        Args:
            call: runs in the background thread after all that were queued before it.

        Returns:
            Its handle.
        """
        future: Future[T] = Future()
        if self._is_own_thread():
            _run(future, call)
            return Handle(future.result, future.done)
        self._last = future
        self._calls.put((future, call))
        return Handle(future.result, future.done)

    def settle(self) -> None:
        """Wait until everything that was queued is done; errors stay with their handles.

        Local. A queued call waits for nothing: what was queued before it is done.
        """
        last = self._last
        if last is not None and not self._is_own_thread():
            last.exception()
            self._last = None

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread


def _work(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        _run(*item)
        del item


def _run(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # belongs to whoever waits for the handle
        future.set_exception(error)
