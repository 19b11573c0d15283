"""Calls that follow a process's exit handlers, such as ``MPI_Finalize``."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import ClassVar


class LastCalls:
    """Calls that end this process's connections with its peers; the last added runs first."""

    # An exit handler runs them. A rank that a launcher has started runs them itself, after it has
    # sent its result, because some calls end the peers, and some wait for peers that do so.

    _calls: ClassVar[list[tuple[Callable[[], None], str]]] = []

    @classmethod
    def add(cls, call: Callable[[], None], *, ends_peers: str = "") -> None:
        """Register a call; `ends_peers` is the reason why it ends the peers, if it does."""
        if not cls._calls:
            atexit.register(cls._at_exit)
        cls._calls.append((call, ends_peers))

    @classmethod
    def leave_to_rank(cls) -> None:
        """Remove the exit handler, because this process is a rank that calls `make` itself."""
        atexit.unregister(cls._at_exit)

    @classmethod
    def make(cls, wait_for_peers: Callable[[str], object]) -> None:
        """Run the calls; if one ends the peers, call `wait_for_peers` with its reason first."""
        reason = next((ends_peers for _, ends_peers in cls._calls if ends_peers), "")
        if reason:
            wait_for_peers(reason)
        while cls._calls:
            call, _ = cls._calls.pop()  # before the call: if it fails, it isn't repeated at exit
            call()

    @classmethod
    def _at_exit(cls) -> None:
        cls.make(lambda _: None)
