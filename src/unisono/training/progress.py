"""A progress bar for the whole job."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unisono.context import current_model

T = TypeVar("T")


def progress(
    iterable: Iterable[T], total: int | None = None, label: str = "", file: TextIO | None = None
) -> Iterator[T]:
    """Iterate, and show one progress bar for the whole job, on rank 0.

    Args:
        iterable: any iterable.
        total: number of items; None for the iterable's length, if it has one.
        label: text before the bar.
        file: the output, stderr by default. A terminal shows a bar; other files get a line for
            each tenth.

    Yields:
        The items.

    Example:
        >>> import io, unisono as idist
        >>> sum(idist.progress([1, 2, 3], file=io.StringIO()))
        6
    """
    if current_model().topology.rank != 0:
        yield from iterable
        return
    if total is None:
        total = len(iterable) if isinstance(iterable, Sized) else None
    out = sys.stderr if file is None else file
    if not out.isatty():
        yield from _logged(iterable, total, f"{label}: " if label else "", out)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    # Redirection would send the loop's stdout to the console's file.
    bar = Progress(
        *columns, console=Console(file=out), redirect_stdout=False, redirect_stderr=False
    )
    with bar:
        yield from bar.track(iterable, total, description=label)


def _logged(iterable: Iterable[T], total: int | None, label: str, out: TextIO) -> Iterator[T]:
    """Yield the items; write a line after each tenth, or one at the end without a total."""
    begin, count = time.monotonic(), 0

    def write(progress: str) -> None:
        rate = count / max(time.monotonic() - begin, 1e-9)  # the clock may not have advanced
        out.write(f"{label}{progress}, {rate:.1f}/s\n")
        out.flush()

    for count, item in enumerate(iterable, 1):
        yield item
        if total and count * 10 // total > (count - 1) * 10 // total:
            write(f"{count}/{total}")
    if not total:
        write(f"{count}")
