"""Deadlines, warnings and checks for absent ranks of operations on the data plane."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from unisono.control.absent_ranks import Absent
from unisono.deadlines import allowed_s, end_of_block, format_s, host_s
from unisono.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ContextError,
    PeerFailedError,
    UnisonoError,
)
from unisono.topology import Group, name_of
from unisono.tracebacks import hides

if TYPE_CHECKING:
    from unisono.control.plane import SocketControlPlane

__tracebackhide__ = hides

_log = logging.getLogger(__name__)
LOOK_S = 0.3
"""Seconds between two looks of a waiting rank for absent ones."""
_AGAIN_S = 0.02


class Wait:
    """One rank's wait within an operation, by its number in the group; 0 for none."""

    def __init__(
        self,
        control: SocketControlPlane,
        group: Group | None,
        call: str,
        step: int = 0,
        until: float | None = None,
    ) -> None:
        self._control, self._group, self._call, self._step = control, group, call, step
        self._begun, self._until = time.monotonic(), until
        self._end = math.nan  # until the first look: mostly there is none
        self._has_absent = self._is_warned = False

    def __call__(self, position: int | None = None) -> None:
        """Raise if a rank is gone, the group has failed or the deadline has passed."""
        # `position` is that of the awaited rank, where shared memory shows it.
        control, now = self._control, time.monotonic()
        absent = control.gone(self._group, self._step)
        if absent is not None and self._has_absent:
            raise PeerFailedError(f"{control.where(self._call)}: {absent.how}", absent.rank)
        if absent is not None:  # its last message may be on its way
            self._has_absent = True
            return
        hub = control.hubs.get(name_of(self._group))
        if hub is not None:
            hub.peers.raise_failure()
        elif position is not None:
            raise ContextError("finalize() was called meanwhile, by another thread")
        if math.isnan(self._end):
            self._end = self._find_end()
        if now >= self._end:
            text = self._overdue(position)
            if hub is not None:
                hub.peers.give_up(text)  # the others can't go on without this rank
            raise CollectiveTimeoutError(text)
        if not self._is_warned and now >= self._begun + host_s(control.warn_after_s()):
            self._is_warned = True
            late = self._late(position, is_over=False)
            _log.warning("%s is still waiting: %s", control.where(self._call), late)

    def fail(self, table: Mapping[str, type[CollectiveError]], error: Exception) -> NoReturn:
        """Raise our error for one of the backend's."""
        if isinstance(error, UnisonoError):
            raise error
        where, text = self._control.where(self._call), str(error).strip()
        ours = mapped(table, text)
        if ours is CollectiveTimeoutError:
            raise ours(f"{self._late()}\n  {where}: {text}") from error
        if ours is PeerFailedError:
            absent = self._find_absent()
            how = absent.how if absent.rank >= 0 else f"{absent.how}: {text}"
            raise PeerFailedError(f"{where}: {how}", absent.rank) from error
        raise ours(f"{where} failed: {text}") from error

    def _find_end(self) -> float:
        timeout_s = allowed_s(self._control, self._group)
        end = math.inf if timeout_s is None else self._begun + host_s(timeout_s)
        return min([end, *(at for at in (end_of_block(), self._until) if at is not None)])

    def _overdue(self, position: int | None) -> str:
        waited = format_s(max(0.0, self._end - self._begun) / host_s(1))  # in the user's seconds
        return (
            f"{self._late(position)}\n  {self._control.where(self._call)}: not done after {waited}"
        )

    def _late(self, position: int | None = None, is_over: bool = True) -> str:
        late = self._control.late(self._group, self._step, is_over) if self._step else ""
        if late or position is None:
            return late or "some rank never arrived"
        rank = self._control.model.topology.members(self._group)[position]
        return f"rank {rank} arrived but did not continue"

    def _find_absent(self) -> Absent:
        """Return the absent rank; those that know it may report only after their next look."""
        until = time.monotonic() + 3 * LOOK_S if self._control.hubs else 0.0
        while True:
            absent = self._control.gone(self._group, self._step)
            if absent is not None:
                return absent
            hub = self._control.hubs.get(name_of(self._group))
            if hub is not None:
                hub.peers.raise_failure()  # which the last look has received
            if time.monotonic() >= until:
                return Absent(-1, "lost a peer")
            time.sleep(_AGAIN_S)


def mapped(table: Mapping[str, type[CollectiveError]], text: str) -> type[CollectiveError]:
    """Return the error of the first pattern that matches a library's text."""
    for pattern, error in table.items():
        if re.search(pattern, text, re.IGNORECASE):
            return error
    return CollectiveError
