"""What a rank looks at while it waits for others inside of an operation on tensors."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unisono.deadlines import allowed_s, format_s, host_s, limit_of
from unisono.errors import CollectiveTimeoutError, PeerFailedError
from unisono.topology import Group

if TYPE_CHECKING:
    from unisono.control.plane import SocketControlPlane

_log = logging.getLogger(__name__)


class Watch:
    """Looks for deaths and deadlines in the operations of one group."""

    def __init__(self, control: SocketControlPlane, group: Group | None, name: str) -> None:
        # Without its handle, and not the group itself, which would never end.
        self._group = None if group is None else replace(group, handle=None)
        self._control, self._name = control, name

    def on(self, control: Any) -> Watch:
        """Return the same for another view of the context."""
        return Watch(control, self._group, self._name)

    def begin(self, call: str) -> Callable[[int], None]:
        """Take note of an operation that begins; give what is called while it waits."""
        return _Look(self._control, self._group, call, self._control.steps.begin(self._name, call))

    def leave(self, call: str, error: BaseException) -> None:
        """Tell the other ranks that this one left an operation half-way."""
        self._control.interrupt(f"{type(error).__name__} interrupted {call}")


class _Look:
    __slots__ = ("_begun", "_call", "_control", "_group", "_is_warned", "_limit_s", "_step")

    def __init__(
        self, control: SocketControlPlane, group: Group | None, call: str, step: int
    ) -> None:
        self._control, self._group, self._call, self._step = control, group, call, step
        self._begun = time.monotonic()
        self._limit_s = math.nan  # until the first look: mostly there is none
        self._is_warned = False

    def __call__(self, position: int) -> None:
        control, now = self._control, time.monotonic()
        if math.isnan(self._limit_s):
            limit_s = limit_of(allowed_s(control, self._group))
            self._limit_s = math.inf if limit_s is None else limit_s
        absent = control.gone(self._group, self._step)
        if absent is not None:
            raise PeerFailedError(f"{self._where()}: {absent.how}", absent.rank)
        failure = control.failure(self._group)
        if failure is not None:
            raise type(failure)(*failure.args)
        if now >= self._begun + host_s(self._limit_s):
            late = self._late(position, is_over=True)
            text = f"{late}\n  {self._where()}: not done after {format_s(self._limit_s)}"
            control.give_up(self._group, text)  # the others can't go on without this rank
            raise CollectiveTimeoutError(text)
        if not self._is_warned and now >= self._begun + host_s(control.warn_after_s()):
            self._is_warned = True
            _log.warning("%s is still waiting: %s", self._where(), self._late(position, False))

    def _late(self, position: int, is_over: bool) -> str:
        rank = self._control.model.topology.members(self._group)[position]
        late = self._control.late(self._group, self._step, is_over)
        return late or f"rank {rank} came, and didn't go on"

    def _where(self) -> str:
        topology = self._control.model.topology
        return f"rank {topology.rank} of {topology.world_size}: {self._call}"
