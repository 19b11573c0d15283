"""Operations of torch.distributed: start, waiting with failure checks, and mapping of errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from unisono.control.signatures import purpose_or
from unisono.control.waiting import LOOK_S, Wait
from unisono.deadlines import allowed_s, end_of_block, host_s, limit_of
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError
from unisono.model.handle import Handle
from unisono.topology import Group, name_of
from unisono.tracebacks import hides

if TYPE_CHECKING:
    from unisono.models.native.model import NativeModel

__tracebackhide__ = hides

_SLICE = timedelta(seconds=LOOK_S)
_LEAST_S = 0.001  # 0 means no limit to torch
_ERRORS: dict[str, type[CollectiveError]] = {
    "timed out": CollectiveTimeoutError,
    "closed by peer|reset by peer|connection closed|broken pipe|socket closed": PeerFailedError,
}


def _handle(group: Group | None) -> Any:
    return None if group is None else group.handle


class NativeCalls:
    """Runs operations for one model."""

    def __init__(self, model: NativeModel, is_watched: bool) -> None:
        self._control = model.control
        self._whole = weakref.ref(model)  # a cycle would keep torch's group and its sockets
        self._is_watched = is_watched

    def run(self, call: str, group: Group | None, start: Callable[..., Any], *args: Any) -> None:
        """Run one operation to completion. Collective over `group`."""
        if not self._is_watched:
            try:
                start(*args, _handle(group))
            except RuntimeError as error:
                self.fail(call, group, error)
            return
        self._wait(group, *self._begin(call, group, start, *args))

    def start(
        self, call: str, group: Group | None, start: Callable[..., Any], *args: Any
    ) -> Handle[None]:
        """Start one operation. As `run` otherwise."""
        call, work, step = self._begin(call, group, start, *args)
        model = self._whole()  # kept alive by the handle, also when another view replaces it
        wait = partial(self._wait, group, call, work, step, end_of_block(), model)
        return Handle(wait, work.is_completed)

    def _begin(
        self, call: str, group: Group | None, start: Callable[..., Any], *args: Any
    ) -> tuple[str, Any, int]:
        """Start an operation; return its name, torch's handle and its number, 0 for none."""
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
        """Send or receive a message without slices: gloo's can't be waited for twice."""
        # Called on two ranks; raises as `run` does.
        limit_s = limit_of(allowed_s(self._control, group))
        try:
            work = start(*args, _handle(group))
            if self._is_watched and limit_s is not None:
                work.wait(timedelta(seconds=max(host_s(limit_s), _LEAST_S)))
            else:
                work.wait()
        except RuntimeError as error:
            self.fail(call, group, error)

    def _wait(
        self,
        group: Group | None,
        call: str,
        work: Any,
        step: int,
        until: float | None = None,
        _keep: object = None,
    ) -> None:
        look = Wait(self._control, group, call, step, until)
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
                    look.fail(_ERRORS, error)
            if not work.is_completed():  # else just after its slice, or with an error
                look()

    def fail(self, call: str, group: Group | None, error: Exception, step: int = 0) -> NoReturn:
        """Raise our error for an error of torch's."""
        Wait(self._control, group, call, step).fail(_ERRORS, error)
