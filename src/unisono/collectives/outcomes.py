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
from unisono.tracebacks import fold, summary

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
    # Collective over `group`. If `refusal` is given, a PayloadError of one rank is raised on every
    # rank as a PayloadError whose text begins with `refusal`. The ranks compare `call`, or `name`
    # without one; `misses` is that of `exchange`.
    report: tuple[str, str] | None = None  # the exception as a line, and its traceback
    if refusal is not None and isinstance(error, PayloadError):
        report = (f"{refusal}{error}", "")
    elif error is not None:
        report = (summary(error), fold(error, error.__traceback__))
    is_consequence = isinstance(error, CollectiveMismatchError)
    # Mostly no rank has an error or a fact, and None is encoded without pickling.
    mine = None if report is None and fact is None else (report, is_consequence, fact)
    with context.calls.begin(name, group):
        try:
            replies = exchange(context, call or name, mine, group, misses)
        except CollectiveMismatchError as mismatch:
            raise mismatch from error
    # This rank raises a Ctrl-C or an exit unchanged; the other ranks have received its report.
    if error is not None and not isinstance(error, Exception):
        raise error
    # A rank that fails may leave others in collectives, which then fail as a consequence. `min`
    # selects the rank that failed by itself, as its `is_consequence` is False.
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
    """Create the error that every rank raises, which leaves all ranks in step."""
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
        # A mismatch with an earlier call is raised on its ranks, too, which then make this call.
        missed = (CollectiveMismatchError,) if misses > 0 else ()
        misses -= 1
        with suppress(*missed):
            return [decode(each, _CPU) for each in exchange_blobs(context, call, frame, group)]
