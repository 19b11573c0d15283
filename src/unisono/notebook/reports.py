"""Errors of a cell that failed: the ranks' own error, with their tracebacks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from unisono.deadlines import format_s
from unisono.errors import CollectiveTimeoutError, UnisonoError
from unisono.launchers.job.failure import Failure
from unisono.notebook.run import INTERRUPT, TIMEOUT, Run
from unisono.topology import named
from unisono.tracebacks import hides, is_full

__tracebackhide__ = hides

_MISSING = re.compile(r"NameError: name '(\w+)' is not defined")
_RENDER = "_render_traceback_"  # IPython asks an exception for it


@contextmanager
def briefly() -> Iterator[None]:
    """Show our errors in a notebook by their texts alone, except those with a rendering."""
    try:
        yield
    except UnisonoError as error:
        if not is_full() and not hasattr(error, _RENDER):
            lines = f"{type(error).__name__}: {error}".splitlines()
            setattr(error, _RENDER, lambda: lines)
        raise


def raise_failure(run: Run, timeout_s: float | None, names: Container[str]) -> None:
    """Raise the error of a cell that failed or was ended early."""
    # A notebook shows the ranks' tracebacks in place of this process's.
    failures = {rank: o.failure for rank, o in run.outcomes.items() if o.failure is not None}
    own = {rank: failure for rank, failure in failures.items() if rank not in run.stacks}
    if run.cut_by == INTERRUPT:
        text = f"the cell was interrupted\n\n{_places(run, own)}"
        _raise(KeyboardInterrupt(), text, run.stays)
    if run.cut_by == TIMEOUT:
        text = f"{named(sorted(run.stacks))} of {run.size} weren't done after "
        text += format_s(timeout_s or 0.0)
        _raise(CollectiveTimeoutError(text), f"{text}\n\n{_places(run, own)}", run.stays)
    first = min(own, key=lambda rank: own[rank].doubt, default=None)
    if run.error is not None and (first is None or own[first].doubt):
        _raise(run.error, str(run.error), run.stays)
    if first is not None:
        ranks = [rank for rank in own if own[rank].traceback == own[first].traceback]
        others = {rank: failure for rank, failure in own.items() if rank not in ranks}
        text = _text(ranks, own[first], run, others) + _remedy(own[first], names)
        _raise(_error(own[first], first, run.size), text, run.stays)


def _error(failure: Failure, rank: int, size: int) -> BaseException:
    """Return the rank's exception, or a substitute if it can't be unpickled here."""
    if failure.cause is not None:
        with suppress(Exception):  # its class may not exist here
            cause = pickle.loads(failure.cause)
            if isinstance(cause, BaseException):
                return cause
    return failure.error(rank, size)


def _text(ranks: list[int], failure: Failure, run: Run, others: dict[int, Failure]) -> str:
    who = f"all {run.size} ranks" if len(ranks) == run.size > 1 else f"{named(ranks)} of {run.size}"
    head = f"{who} raised {failure.summary}" + (f"\n  at {failure.line}" if failure.line else "")
    rest = _places(run, others)
    return f"{head}\n\n{failure.traceback}" + (f"\nThe others:\n{rest}" if rest else "")


def _remedy(failure: Failure, names: Container[str]) -> str:
    missing = _MISSING.match(failure.summary)
    if missing is None or missing[1] not in names:
        return ""
    return f"\nthe notebook has {missing[1]}, its ranks don't: define it in a cell of %%ranks"


def _places(run: Run, failures: dict[int, Failure]) -> str:
    """Return the text of each rank's stack, equal ones once."""
    texts: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        texts.setdefault(failure.traceback, []).append(rank)
    for rank, stack in run.stacks.items():
        texts.setdefault(stack or "it doesn't answer\n", []).append(rank)
    parts = ((named(sorted(ranks)), text) for text, ranks in texts.items())
    return "\n".join(f"{who} of {run.size}:\n{text}" for who, text in parts)


def _raise(error: BaseException, text: str, stays: str) -> NoReturn:
    """Raise an error that a notebook shows as text."""
    lines = [*text.rstrip().splitlines(), *(["", f"{stays}."] if stays else [])]
    with suppress(AttributeError):  # an exception may have slots
        setattr(error, _RENDER, lambda: lines)
    raise error
