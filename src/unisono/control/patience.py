"""How long a rank looks for what it waits for before it sleeps: waking it costs more than that."""

from __future__ import annotations

import time

__all__ = ("Patience",)

_LOOK_S = 200e-6  # longer than a wake-up takes, or one slow round would make the next one slow
_MOST_NAPS = 64


class Patience:
    """What one rank has learnt of its waits.

    Where a look was in vain, the next rounds sleep at once: twice as many each time, up to 64.
    """

    def __init__(self) -> None:
        self._naps, self._next_naps = 0, 1

    def until(self) -> float:
        """Give until when to look, by ``time.monotonic()``; 0 for not at all. Local."""
        if self._naps > 0:
            self._naps -= 1
            return 0.0
        return time.monotonic() + _LOOK_S

    def learn(self, has_come: bool) -> None:
        """Take note of how a look ended. Local."""
        self._naps = 0 if has_come else self._next_naps
        self._next_naps = 1 if has_come else min(2 * self._next_naps, _MOST_NAPS)
