"""The traceback at the end of what a program says, which its report tells instead."""

from __future__ import annotations

import time

__all__ = ("Held",)

_HEAD = b"Traceback (most recent call last):"
_LONGEST_S = 10.0  # from a traceback to the end of a program that says no more
_PAUSE_S = 0.5  # after which more lines show that the program goes on
_MOST_BYTES = 128 * 1024


class Held:
    """Lines from a traceback on, kept until it is known whether the program ends with them."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._is_ignored = False  # whether Python says next which exception it ignored
        self.begun_at = self._last_at = 0.0

    def take(self, line: bytes) -> bool:
        """Take one line in, unless no traceback has begun; tell whether it was taken. Local."""
        is_ignored, self._is_ignored = self._is_ignored, line.startswith(b"Exception ignored ")
        if not self._lines and (is_ignored or not line.startswith(_HEAD)):
            return False
        self._last_at = time.monotonic()
        if not self._lines:
            self.begun_at = self._last_at
        self._lines.append(line)
        self._size += len(line)
        return True

    def left_s(self) -> float | None:
        """Give the seconds until what is held is no program's end, None for nothing. Local."""
        if not self._lines:
            return None
        if self._size > _MOST_BYTES:
            return 0.0
        return max(0.0, self._last_at + _LONGEST_S - time.monotonic())

    def is_refuted(self) -> bool:
        """Tell whether more that comes now shows that the program goes on. Local."""
        return bool(self._lines) and time.monotonic() > self._last_at + _PAUSE_S

    def give(self) -> bytes:
        """Give the lines, and hold them no longer. Local."""
        lines, self._lines, self._size = self._lines, [], 0
        return b"".join(lines)
