"""The clock of limits and warnings, where a test owns it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono import deadlines


@contextmanager
def fast_clock(rate: float = 60.0) -> Iterator[None]:
    """Let limits and warnings that begin in this process pass `rate` times as fast as the host's.

    A minute takes a second. Ranks that are processes have clocks of their own, so there it stands
    in the rank's function; ranks that are threads share one, which is as before once any of them
    leaves the block.
    """
    vars(deadlines)["_RATE"] = rate
    try:
        yield
    finally:
        vars(deadlines)["_RATE"] = 1.0
