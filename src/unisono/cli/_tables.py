"""Tables that fit the terminal, and are plain text elsewhere."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NARROWEST = 20
_GAP = 2  # between columns of plain text; a frame takes one more


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Args:
        title: its head.
        is_number: whether it is flush right.
        rank: those of the highest rank are left out first where the terminal is too narrow; 0
            for never.
    """

    title: str
    is_number: bool = False
    rank: int = 0


def folded(line: str, indent: int = 0) -> str:
    """Indent a line; on a terminal, fold it between words to fit."""
    indent += len(line) - len(line.lstrip())
    if not Console().is_terminal:
        return " " * indent + line.lstrip()
    return textwrap.fill(
        line.lstrip(),
        max(shutil.get_terminal_size().columns, _NARROWEST),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + _GAP),
        break_long_words=False,
        break_on_hyphens=False,
    )


def show(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table: on a terminal as wide as it, elsewhere one plain line for each row."""
    # Figures are never cut: columns of a rank are left out where they don't fit.
    console = Console(highlight=False)
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [
        max([len(column.title), *(len(row[at]) for row in cells)])
        for at, column in enumerate(columns)
    ]
    if not console.is_terminal:
        _print_plain(console, title, columns, cells, widths)
        return
    kept = _fitting(columns, widths, console.width)
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for at in kept:
        column = columns[at]
        table.add_column(
            column.title,
            justify="right" if column.is_number else "left",
            no_wrap=True,
        )
    for row in cells:
        table.add_row(*(row[at] for at in kept))
    console.print(table)


def _fitting(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """Choose columns that fit."""
    kept = list(range(len(columns)))
    while sum(widths[at] for at in kept) + (_GAP + 1) * len(kept) > room:
        last = max(kept, key=lambda at: columns[at].rank)
        if columns[last].rank == 0:
            break
        kept.remove(last)
    return kept


def _print_plain(
    console: Console,
    title: str,
    columns: Sequence[Column],
    cells: Sequence[Sequence[Text]],
    widths: Sequence[int],
) -> None:
    """Print aligned lines without colours, frames or folds."""

    def line(texts: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if column.is_number else text.ljust(width)
            for text, width, column in zip(texts, widths, columns, strict=True)
        )
        return (" " * _GAP).join(padded).rstrip()

    lines = [title, line([column.title for column in columns])]
    lines += [line([cell.plain for cell in row]) for row in cells]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
