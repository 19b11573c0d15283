"""A condition variable that an asynchronous exception leaves usable.

Ctrl-C, an alarm's handler or a test's timeout may raise between any two bytecodes.
`threading.Condition`, and with it Event, Future and Queue, enters and leaves in Python, so an
exception at the wrong moment leaves it locked for good. A built-in lock in a ``with`` statement
has no such moment, and nothing here is held while a thread sleeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LONGEST_NAP_S = 0.2  # a thread that was interrupted may have woken only some of the others


class Condition:
    """A lock with `wait` and `notify_all`; hold `lock` while changing state."""

    def __init__(self) -> None:
        self.lock: threading.Lock = threading.Lock()
        self._sleepers: list[threading.Lock] = []  # each locked until notified

    def notify_all(self) -> None:
        """Notify all waiting threads; call it with the lock held."""
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.release()

    def wait(self, is_ready: Callable[[], object], limit_s: float) -> bool:
        """Return whether `is_ready` holds within `limit_s`; call it without the lock."""
        until = time.monotonic() + limit_s
        while True:
            sleeper = threading.Lock()
            sleeper.acquire()  # `notify_all` releases it
            with self.lock:
                if is_ready():  # with the lock: a notification after this look finds the sleeper
                    return True
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                self._sleepers.append(sleeper)
            if not sleeper.acquire(timeout=min(left_s, _LONGEST_NAP_S)):
                with self.lock:
                    if sleeper in self._sleepers:
                        self._sleepers.remove(sleeper)
