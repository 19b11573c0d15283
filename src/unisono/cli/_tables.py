"""Tables that fit the terminal; without a terminal they are plain text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NARROWEST = 20  # columns for text, even on a narrower terminal
_INDENT = 2  # of all lines of a wrapped text but the first
_UNLIMITED = 1 << 16


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, perhaps dropped on a narrow terminal."""

    # Columns with the highest `drop_order` are dropped first; 0 is never dropped.

    title: str
    is_number: bool = False
    drop_order: int = 0


def wrapped(line: str, indent: int = 0) -> str:
    """Return a line indented and, on a terminal, wrapped between words."""
    indent += len(line) - len(line.lstrip())
    if not Console().is_terminal:
        return " " * indent + line.lstrip()
    return textwrap.fill(
        line.lstrip(),
        max(shutil.get_terminal_size().columns, _NARROWEST),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + _INDENT),
        break_long_words=False,  # so that paths and names can be copied
        break_on_hyphens=False,
    )


def table_of(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> Table:
    """Build a table whose cells are plain text, in one line each."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.is_number else "left"
        table.add_column(column.title, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def show(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table that fits the terminal; without one, print a plain line for each row."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNLIMITED)
    # Measure at unlimited width: at the terminal's width rich would shrink the columns, and every
    # table would seem to fit.
    unlimited = console.options.update(max_width=_UNLIMITED)
    for last in sorted({column.drop_order for column in columns}, reverse=True):
        kept = [index for index, column in enumerate(columns) if column.drop_order <= last]
        kept_cells = [[row[index] for index in kept] for row in rows]
        table = table_of([columns[index] for index in kept], kept_cells)
        table.box = SIMPLE_HEAD if console.is_terminal else None
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    with console.capture() as captured:  # rich fills lines with spaces, which are removed
        console.print(Text(title, "italic"), table, sep="\n")
    typer.echo("\n".join(map(str.rstrip, captured.get().splitlines())))
