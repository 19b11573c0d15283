"""What every rank raises where one of them failed in code that it ran for the others."""

from __future__ import annotations

from unisono.errors import PeerFailedError
from unisono.tracebacks import fold, hides, summary

__tracebackhide__ = hides

Report = tuple[str, str]
"""An exception as a line, and its traceback."""


def report(error: BaseException) -> Report:
    """Write down an exception for the other ranks."""
    return summary(error), fold(error, error.__traceback__)


def failure(rank: int, name: str, reported: Report) -> PeerFailedError:
    """Make the error that every rank raises, all of them in step."""
    headline, text = reported
    failed = PeerFailedError(
        f"rank {rank} raised {headline} in {name}\n\n{text}", rank=rank, traceback=text
    )
    failed.is_in_step = True
    return failed
