"""Handles of pending operations, and the thread that runs operations without a native handle."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from unisono.errors import ContextError, UnisonoError

__all__ = ("BACKGROUND", "Background", "Handle", "SafeFuture", "joined")

BACKGROUND = "unisono-background"
"""Prefix of the names of threads that run pending operations."""
T = TypeVar("T")
U = TypeVar("U")


class SafeFuture(Generic[T]):
    """The value or the error of a call."""

    # In place of `concurrent.futures.Future`, whose own lock an asynchronous exception (Ctrl-C, an
    # alarm) may leave locked. Here the gate is the only lock, and the interpreter waits for it.

    __slots__ = ("_error", "_gate", "_value", "is_known")

    def __init__(self) -> None:
        self.is_known: bool = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def of(
        self, call: Callable[[], T], is_own: Callable[[BaseException], bool] = lambda _: True
    ) -> None:
        """Run a call, record its value or error, and wake the waiting threads."""
        try:
            self._value = call()
        except BaseException as error:
            if not is_own(error):
                raise  # the call was interrupted and can run again
            self._error = error
        self.is_known = True  # last, because other threads read it without a lock
        self._gate.release()

    @classmethod
    def in_thread(cls, call: Callable[[], T], name: str) -> tuple[SafeFuture[T], threading.Thread]:
        """Run a call in a daemon thread; return its outcome, and the thread."""
        outcome = cls()
        thread = threading.Thread(target=outcome.of, args=(call,), name=name, daemon=True)
        thread.start()
        return outcome, thread

    def wait(self) -> T:
        """Wait for the value, or raise the error."""
        if not self.is_known:
            with self._gate:
                pass  # released at once, for the next waiting thread
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


class Handle(Generic[T]):
    """A pending operation.

    Args:
        wait: blocks until the operation is done; returns its value or raises its error. Called
            again after an interruption by another exception, such as a KeyboardInterrupt.
        is_completed: whether `wait` would return at once.
    """

    __slots__ = ("_is_completed", "_outcome", "_pid", "_turn", "_wait", "_waits")

    def __init__(self, wait: Callable[[], T], is_completed: Callable[[], bool]) -> None:
        self._wait: Callable[[], T] | None = wait
        self._is_completed = is_completed
        self._outcome: SafeFuture[T] = SafeFuture()
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._waits = False

    def wait(self) -> T:
        """Wait for the operation.

        The collective part was started when the handle was created. If the wait is
        interrupted, as by Ctrl-C, the operation continues, and `wait` can be called again.

        Returns:
            The value that the blocking call would have returned; the same object on every call.

        Raises:
            UnisonoError: the operation failed, as in the blocking call; on every call.
            ContextError: this process is a fork of the one that started the operation.
        """
        self._check_process()
        if not self._outcome.is_known:
            with self._turn:  # a second thread continues after an interrupted one
                if self._wait is not None and not self._outcome.is_known:
                    self._waits = True
                    try:
                        self._outcome.of(self._wait, self._is_own)
                        self._wait = None  # frees what the call refers to
                    finally:
                        self._waits = False
        return self._outcome.wait()

    def _is_own(self, error: BaseException) -> bool:
        """Return whether an error is the operation's own, and not an interrupt of the wait."""
        if isinstance(error, UnisonoError):
            return True
        # While the operation is pending, only a signal's handler, such as an alarm's, can raise.
        return isinstance(error, Exception) and self._is_completed()

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once.

        Returns:
            True once the operation is done or has failed.

        Raises:
            ContextError: this process is a fork of the one that started the operation.
        """
        self._check_process()
        return self._outcome.is_known or (not self._waits and self._is_completed())

    def _check_process(self) -> None:
        """Raise in a fork: no thread completes the operation there, so a wait would be endless."""
        if not self._outcome.is_known and self._pid != os.getpid():
            raise ContextError(
                f"this process is a fork of process {self._pid}, which started the operation and "
                "alone can wait for it: call wait() there before the fork"
            )

    def then(self, finish: Callable[[T], U]) -> Handle[U]:
        """Return a handle whose value is `finish` of this handle's value.

        Args:
            finish: called once, in the waiting thread.

        Returns:
            A new handle; wait only for that one.
        """
        return Handle(lambda: finish(self.wait()), self.is_completed)


def joined(outer: Handle[Handle[T]]) -> Handle[T]:
    """Return one handle for an operation that another operation starts."""

    def is_completed() -> bool:
        if not outer.is_completed():
            return False
        try:
            return outer.wait().is_completed()
        except Exception:  # `wait` raises it again
            return True

    return Handle(lambda: outer.wait().wait(), is_completed)


_Calls = SimpleQueue["tuple[SafeFuture[Any], Callable[[], Any]] | None"]


class Background:
    """Thread that runs calls in the order of submission."""

    # A model's collectives must start in the same order on every rank, so there is one thread for
    # each context; a call that uses the model directly waits for `settle` first. The thread ends
    # after the last call once nothing refers to this object.

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._last: SafeFuture[Any] | None = None
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        # Not at exit, where nothing waits for this daemon thread.
        weakref.finalize(self, self._calls.put, None).atexit = False
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Handle[T]:
        """Queue a call."""
        # A call submitted by a queued call is part of that call, and runs at once: if queued, its
        # position among the other calls would differ between ranks.
        outcome: SafeFuture[T] = SafeFuture()
        if self._is_own_thread():
            outcome.of(call)
        else:
            self._last = outcome
            self._calls.put((outcome, call))
        return Handle(outcome.wait, lambda: outcome.is_known)

    def settle(self) -> None:
        """Wait until all queued calls are done; their handles raise the errors."""
        # A queued call needn't wait, because all calls before it are done.
        last = self._last
        if last is None or self._is_own_thread():
            return
        if not last.is_known:
            # An interrupted `submit` may not have queued it, so this waits for another call.
            after: SafeFuture[None] = SafeFuture()
            self._calls.put((after, lambda: None))
            after.wait()
        if self._last is last:  # another thread may have submitted a call
            self._last = None

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread


def _work(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        outcome, call = item
        outcome.of(call)
        # Else these names would keep the tensors alive until the next call.
        del item, outcome, call
