"""The clock of limits and warnings, under a test's control."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono import deadlines


@contextmanager
def fast_clock(rate: float = 60.0) -> Iterator[None]:
    """Let the clock of limits and warnings in this process run `rate` times as fast.

    By default a minute takes a second. Each process has its own clock, so the function of a rank
    that is a process must use this itself. Ranks that are threads share a clock, which is reset
    once any of them leaves the block.
    """
    vars(deadlines)["_RATE"] = rate
    try:
        yield
    finally:
        vars(deadlines)["_RATE"] = 1.0
