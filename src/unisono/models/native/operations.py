"""How an operation of torch.distributed is run: its errors, and what is noticed while it waits."""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from unisono.control.absent_ranks import Absent
from unisono.control.plane import SocketControlPlane
from unisono.control.signatures import purpose_or
from unisono.deadlines import allowed_s, end_of_block, format_s, host_s, limit_of
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError
from unisono.model.error_mapping import ErrorRow, mapped
from unisono.model.handle import Handle
from unisono.topology import Group, name_of
from unisono.tracebacks import hides

__tracebackhide__ = hides

_log = logging.getLogger(__name__)
_SLICE = timedelta(seconds=0.3)
_LOOK_S = 0.02
LEAST_S = 0.001
"""The shortest timeout to give to torch, which takes 0 for no limit."""
_ERRORS = (
    ErrorRow(TimeoutError, "", CollectiveTimeoutError),
    ErrorRow(Exception, "timed out", CollectiveTimeoutError),
    ErrorRow(
        Exception,
        "closed by peer|reset by peer|connection closed|broken pipe|socket closed",
        PeerFailedError,
    ),
    ErrorRow(Exception, "", CollectiveError),
)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let the operations of one of torch's groups take that long."""
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # no public name in torch 2.13
    if change is not None:
        change(timeout, group)


def _handle(group: Group | None) -> Any:
    return None if group is None else group.handle


class Watched(Protocol):
    """What this file needs of a model."""

    control: SocketControlPlane


class Calls:
    """Runs operations for one model."""

    def __init__(self, model: Watched, is_watched: bool) -> None:
        self._control = model.control
        self._whole = weakref.ref(model)  # a cycle would keep torch's group and its sockets
        self._is_watched = is_watched

    def run(self, call: str, group: Group | None, start: Callable[..., Any], *args: Any) -> None:
        """Run one operation to its end. Collective over `group`."""
        if not self._is_watched:
            try:
                start(*args, _handle(group))
            except RuntimeError as error:
                self.fail(call, group, error)
            return
        call, work, step = self._begin(call, group, start, *args)
        self._wait(call, group, work, step)

    def start(
        self, call: str, group: Group | None, start: Callable[..., Any], *args: Any
    ) -> Handle[None]:
        """Start one operation. As `run` otherwise."""
        call, work, step = self._begin(call, group, start, *args)
        model = self._whole()  # which the handle keeps, also when another view takes its place
        return Handle(
            partial(self._wait, call, group, work, step, end_of_block(), model), work.is_completed
        )

    def _begin(
        self, call: str, group: Group | None, start: Callable[..., Any], *args: Any
    ) -> tuple[str, Any, int]:
        """Return what it is called, torch's handle, and its number in the group; 0 for none."""
        call, step = purpose_or(call), 0
        if self._is_watched:
            step = self._control.steps.begin(name_of(group), call)
        try:
            return call, start(*args, _handle(group), async_op=True), step
        except RuntimeError as error:
            self.fail(call, group, error, step)

    def message(
        self, call: str, group: Group | None, start: Callable[..., Any], *args: Any
    ) -> None:
        """Send or receive a message: no slices, for gloo's can't be waited for twice."""
        # Takes two ranks, and raises as `run`.
        limit_s = limit_of(allowed_s(self._control, group))
        try:
            work = start(*args, _handle(group))
            if self._is_watched and limit_s is not None:
                work.wait(timedelta(seconds=max(host_s(limit_s), LEAST_S)))
            else:
                work.wait()
        except RuntimeError as error:
            self.fail(call, group, error)

    def _wait(
        self,
        call: str,
        group: Group | None,
        work: Any,
        step: int,
        until: float | None = None,
        _keep: object = None,
    ) -> None:
        absent: Absent | None = None
        limit_s = limit_of(allowed_s(self._control, group), until)
        begun = time.monotonic()
        until = math.inf if limit_s is None else begun + host_s(limit_s)
        warn_at = 0.0  # until the first slice is over
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
                    self.fail(call, group, error, step)
            if work.is_completed():  # just after its slice, or with an error: the next wait tells
                continue
            if absent is not None:  # after one more slice, for its last message was on its way
                raise PeerFailedError(f"{self._control.where(call)}: {absent.how}", absent.rank)
            now = time.monotonic()
            if now >= until:
                timeout = TimeoutError(f"not done after {format_s(limit_s or 0)}")
                self.fail(call, group, timeout, step)
            warn_at = warn_at or begun + host_s(self._control.warn_after_s())
            if now >= warn_at:
                warn_at = math.inf
                late = self._control.late(group, step, is_over=False)
                _log.warning("%s is still waiting: %s", self._control.where(call), late)
            absent = self._control.gone(group, step)

    def fail(self, call: str, group: Group | None, error: Exception, step: int = 0) -> NoReturn:
        """Raise the error of ours for one of torch's."""
        ours, where, text = mapped(_ERRORS, error), self._control.where(call), str(error).strip()
        if ours is CollectiveTimeoutError:
            late = self._control.late(group, step) if step else ""
            raise ours(f"{late or 'some rank never came'}\n  {where}: {text}") from error
        if ours is PeerFailedError:
            absent = self._find_absent(group, step)
            how = absent.how if absent.rank >= 0 else f"{absent.how}: {text}"
            raise PeerFailedError(f"{where}: {how}", absent.rank) from error
        raise CollectiveError(f"{where} failed: {text}") from error

    def _find_absent(self, group: Group | None, step: int) -> Absent:
        """Find out who is gone: those that know it may tell after their slice of waiting."""
        until = time.monotonic() + 3 * _SLICE.total_seconds() if self._is_watched else 0.0
        while True:
            absent = self._control.gone(group, step)
            if absent is not None:
                return absent
            if time.monotonic() >= until:
                return Absent(-1, "lost a peer")
            time.sleep(_LOOK_S)
