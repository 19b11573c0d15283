"""The edge of a model: a table says which exception of its library becomes which of our errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from unisono.errors import CollectiveError, UnisonoError
from unisono.tracebacks import hides

__all__ = ("ErrorRow", "map_errors", "mapped")

__tracebackhide__ = hides


class ErrorRow(NamedTuple):
    """One row of a model's table; the first row that matches counts."""

    raised: type[Exception] | tuple[type[Exception], ...]
    pattern: str
    error: type[CollectiveError]


def mapped(
    table: Sequence[ErrorRow], error: Exception, message: str | None = None
) -> type[CollectiveError] | None:
    """Look up which of our errors an exception becomes."""
    if isinstance(error, UnisonoError):
        return None
    text = str(error) if message is None else message
    for row in table:
        if isinstance(error, row.raised) and re.search(row.pattern, text, re.IGNORECASE):
            return row.error
    return None


@contextmanager
def map_errors(
    table: Sequence[ErrorRow],
    make: Callable[[type[CollectiveError], Exception], CollectiveError],
) -> Iterator[None]:
    """Raise our errors for those of a library; what no row matches passes."""
    try:
        yield
    except Exception as error:
        ours = mapped(table, error)
        if ours is None:
            raise
        raise make(ours, error) from error
