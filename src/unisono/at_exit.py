"""Calls after a process's exit handlers, such as ``MPI_Finalize``."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator
from typing import ClassVar


class LastCalls:
    """Calls that end what this process shares with its peers, in reverse order."""

    # An exit handler makes them. A rank that a launcher started makes them after it has sent its
    # result, because some of them end the peers, and some wait for peers that do so.

    _calls: ClassVar[list[tuple[Callable[[], None], str]]] = []
    _is_held: ClassVar[bool] = False

    @classmethod
    def add(cls, call: Callable[[], None], *, ends_peers: str = "") -> None:
        """Register a call."""
        if not cls._calls:
            atexit.register(cls._at_exit)
        cls._calls.append((call, ends_peers))

    @classmethod
    @contextlib.contextmanager
    def held(cls) -> Iterator[None]:
        """Leave the calls to `make` if the exit handlers run within the block."""
        cls._is_held = True
        try:
            yield
        finally:
            cls._is_held = False

    @classmethod
    def make(cls, wait_for_peers: Callable[[str], object]) -> None:
        """Make the calls."""
        reason = next((ends_peers for _, ends_peers in cls._calls if ends_peers), "")
        if reason:
            wait_for_peers(reason)
        while cls._calls:
            call, _ = cls._calls.pop()
            call()

    @classmethod
    def _at_exit(cls) -> None:
        if not cls._is_held:
            cls.make(lambda _: None)
