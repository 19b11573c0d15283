"""What processes print, passed on as it comes, and the end of it."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

_KEPT_BYTES = 65536


def show_error(data: bytes) -> None:
    """Print to stderr, which may be closed, or a user's own."""
    with contextlib.suppress(Exception):
        sys.stderr.write(data.decode(errors="replace"))
        sys.stderr.flush()


class Tail:
    """Passes on what comes from a pipe until it ends, and keeps the end of it."""

    def __init__(self, pipe: IO[bytes] | None, show: Callable[[bytes], Any] = show_error) -> None:
        assert isinstance(pipe, io.BufferedReader)
        self._pipe = pipe
        self._show = show
        self._kept = b""
        self._thread = threading.Thread(target=self._pass_on, name="unisono-output", daemon=True)
        self._thread.start()

    def has_ended(self, within_s: float) -> bool:
        """Wait for the pipe's end, which processes that the user left behind may put off."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def read(self, within_s: float = 1.0) -> str:
        """Return the end of what was printed; wait so long for more."""
        self._thread.join(within_s)
        return self._kept.decode(errors="replace")

    def _pass_on(self) -> None:
        with self._pipe:
            while chunk := self._pipe.read1(65536):
                self._kept = (self._kept + chunk)[-_KEPT_BYTES:]
                self._show(chunk)
        self._show(b"")
