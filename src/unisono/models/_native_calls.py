"""How an operation of torch.distributed is run: its errors, and what is noticed while it waits."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from unisono.control import plane
from unisono.control.absence import Absent
from unisono.control.deadlines import limit_of
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

__all__ = ("Calls",)

_SLICE = timedelta(seconds=0.3)
_LEAST_S = 0.001  # torch takes 0 for no limit
_GONE = ("closed by peer", "reset by peer", "connection closed", "broken pipe", "socket closed")


class Calls:
    """Runs operations for one model.

    Args:
        model: whose they are.
        is_watched: whether a wait is done in slices, between which peers are looked at: right for
            gloo, which tells only the neighbours of a dead rank.
    """

    def __init__(self, model: plane.Meeting, is_watched: bool) -> None:
        self._model = weakref.proxy(model)  # a cycle would keep torch's group and its sockets
        self._is_watched = is_watched

    def run(self, call: str, start: Callable[..., Any], *args: Any) -> None:
        """Run one operation to its end.

        Collective as the operation is.

        Args:
            call: its name.
            start: starts it; takes ``async_op=True`` for a handle.
            args: of `start`.

        Raises:
            CollectiveError: a peer failed, or didn't come in time.
        """
        try:
            if not self._is_watched:
                start(*args)
                return
            work = start(*args, async_op=True)
        except RuntimeError as error:
            self.fail(call, error)
        self.wait(call, work)

    def message(self, call: str, start: Callable[..., Any], *args: Any) -> None:
        """Send or receive a message: no slices, for gloo's can't be waited for twice.

        Collective as the operation is, and raises as `run`.
        """
        limit_s = limit_of(self._model.timeout_s)
        try:
            work = start(*args)
            if self._is_watched and limit_s is not None:
                work.wait(timedelta(seconds=max(limit_s, _LEAST_S)))
            else:
                work.wait()
        except RuntimeError as error:
            self.fail(call, error)

    def wait(self, call: str, work: Any) -> None:
        """Wait for an operation under way. Collective as the operation is; raises as `run`."""
        absent: Absent | None = None
        limit_s = limit_of(self._model.timeout_s)
        until = math.inf if limit_s is None else time.monotonic() + limit_s
        while True:
            is_over = not self._is_watched or work.is_completed()
            try:
                if is_over:
                    work.wait()
                else:
                    work.wait(_SLICE)
                return
            except RuntimeError as error:
                if is_over:
                    self.fail(call, error)
            if work.is_completed():  # just after its slice, or with an error: the next wait tells
                continue
            if absent is not None:  # after one more slice, for its last message was on its way
                raise PeerFailedError(f"{self._where(call)}: {absent.how}", absent.rank)
            if time.monotonic() >= until:
                self.fail(call, TimeoutError(f"not done after {limit_s or 0:.3g} s"))
            absent = plane.gone(self._model)

    def fail(self, call: str, error: Exception) -> NoReturn:
        """Raise the error of ours for one of torch's. Local."""
        text = str(error).strip()
        if isinstance(error, TimeoutError) or "timed out" in text.lower():
            late = plane.late(self._model)
            who = f"\n{late}" if late else ": some rank didn't come"
            raise CollectiveTimeoutError(f"{self._where(call)} timed out: {text}{who}") from error
        if any(sign in text.lower() for sign in _GONE):
            absent = plane.gone(self._model) or Absent(-1, "lost a peer")
            text = f"{self._where(call)}: {absent.how}: {text}"
            raise PeerFailedError(text, absent.rank) from error
        raise CollectiveError(f"{self._where(call)} failed: {text}") from error

    def _where(self, call: str) -> str:
        topology = self._model.topology
        return f"rank {topology.rank} of {topology.world_size}: {call}"
