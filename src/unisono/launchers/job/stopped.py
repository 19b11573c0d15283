"""Ranks of this host that a signal has stopped, where nobody is told of it by the kernel."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from unisono.control.missing import is_stopped
from unisono.errors import WorkerFailedError

__all__ = ("Stops",)

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_GRACE_S = 1.0  # ranks that wait for one that is stopped know more: their error comes first


class Stops:
    """How long ranks have been stopped.

    Args:
        limit_s: seconds for which one may be.
        world_size: ranks of the job.
    """

    def __init__(self, limit_s: float, world_size: int) -> None:
        self._limit_s = limit_s + _GRACE_S
        self._world_size = world_size
        self._stopped_s: dict[int, float] = {}
        self._looked_at = time.monotonic()

    def look(self, pids: Mapping[int, int]) -> WorkerFailedError | None:
        """Look at processes from time to time, and warn of each that is stopped.

        Local.

        Args:
            pids: of ranks that aren't done, by rank.

        Returns:
            The error of one that has been stopped for too long.
        """
        passed = time.monotonic() - self._looked_at
        if passed < _LOOK_S:
            return None
        self._looked_at += passed
        stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}
        for rank in stopped - self._stopped_s.keys():
            _log.warning(
                "rank %d of %d was stopped by a signal, and goes on after SIGCONT",
                rank, self._world_size,
            )  # fmt: skip
        # If this process was stopped too, the time counts for nobody.
        passed = min(passed, 2 * _LOOK_S)
        self._stopped_s = {rank: self._stopped_s.get(rank, -passed) + passed for rank in stopped}
        late = [rank for rank, seconds in self._stopped_s.items() if seconds > self._limit_s]
        if not late:
            return None
        return WorkerFailedError(
            f"rank {late[0]} of {self._world_size} was stopped by a signal, and hasn't gone on for "
            f"{self._stopped_s[late[0]]:.3g} s",
            late[0],
            signal="SIGSTOP",
        )
