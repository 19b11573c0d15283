"""Errors raised on every rank when one rank fails in code that it runs for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from unisono.collectives.call import T, exchange_blobs, guarded
from unisono.context import ContextState
from unisono.errors import CollectiveMismatchError, PayloadError, PeerFailedError
from unisono.payload.codec import decode, encode
from unisono.topology import Group
from unisono.tracebacks import fold, hides, summary

__tracebackhide__ = hides

_CPU = torch.device("cpu")


def agreed(
    context: ContextState,
    name: str,
    error: BaseException | None = None,
    fact: Any = None,
    group: Group | None = None,
    *,
    call: str = "",
    refusal: str | None = None,
    misses: int = 0,
) -> list[Any]:
    """Return every rank's fact; raise on every rank if one has an error."""
    # Collective over `group`. With a `refusal`, the prefix of its text, a PayloadError of one rank
    # is a PayloadError on every rank.
    report: tuple[str, str] | None = None  # the exception as a line, and its traceback
    if refusal is not None and isinstance(error, PayloadError):
        report = (f"{refusal}{error}", "")
    elif error is not None:
        report = (summary(error), fold(error, error.__traceback__))
    is_consequence = isinstance(error, CollectiveMismatchError)
    # Mostly no rank has an error or a fact: None is encoded without a pickle.
    mine = None if report is None and fact is None else (report, is_consequence, fact)
    with context.calls.begin(name, group):
        try:
            replies = exchange(context, call or name, mine, group, misses)
        except CollectiveMismatchError as mismatch:
            raise mismatch from error
    # The other ranks know of a Ctrl-C or an exit now, which this rank raises unchanged.
    if error is not None and not isinstance(error, Exception):
        raise error
    # A failed rank leaves others in collectives, which then fail as a consequence: `min` reports
    # the failed one, whose mark is False.
    ranks = context.model.topology.members(group)
    failed = [
        (reply[1], rank, reply[0])
        for rank, reply in zip(ranks, replies, strict=True)
        if reply is not None and reply[0] is not None
    ]
    if failed:
        _, rank, (line, trace) = min(failed)
        raise (_failure(rank, name, line, trace) if trace else PayloadError(line)) from error
    return [None if reply is None else reply[2] for reply in replies]


def _failure(rank: int, name: str, line: str, trace: str) -> PeerFailedError:
    """Create the error that every rank raises, all of them in step."""
    failed = PeerFailedError(
        f"rank {rank} raised {line} in {name}\n\n{trace}", rank=rank, traceback=trace
    )
    failed.is_in_step = True
    return failed


def together(
    context: ContextState,
    name: str,
    call: Callable[[], tuple[T, Any]],
    group: Group | None = None,
    *,
    refusal: str | None = None,
    misses: int = 0,
) -> tuple[T, list[Any]]:
    """Return a function's value and every rank's fact; raise on all ranks if it fails on one."""
    # Collective over `group`.
    error: Exception | None = None
    value: Any = None
    frame = b""
    try:
        value, fact = call()
        frame = encode(fact)
    except Exception as raised:  # classes of the user may raise anything
        error = raised
    frames = agreed(context, name, error, frame, group, refusal=refusal, misses=misses)
    return value, [decode(each, _CPU) for each in frames]


@guarded
def exchange(
    context: ContextState, call: str, value: Any, group: Group | None = None, misses: float = 0
) -> list[Any]:
    """Return every rank's value; other ranks may still be in up to `misses` earlier calls."""
    context.settle(group)
    frame = encode(value)
    while True:
        # The mismatch is raised on those ranks, too, which then call this.
        missed = (CollectiveMismatchError,) if misses > 0 else ()
        misses -= 1
        with suppress(*missed):
            return [decode(each, _CPU) for each in exchange_blobs(context, call, frame, group)]
