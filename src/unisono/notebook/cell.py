"""A cell in one rank: runs in the rank's own namespace, and returns its outcome."""

from __future__ import annotations

import ast
import builtins
import linecache
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import unisono
from unisono import context
from unisono.launchers.job.failure import Failure
from unisono.launchers.job.worker import describe
from unisono.model.contract import ComputationModel
from unisono.notebook.capture import captured
from unisono.pool.worker import leaves_out_of_step
from unisono.tracebacks import hides

__tracebackhide__ = hides

_READY = ("idist", "rank", "size")
# By set of ranks and rank, in a rank's own process; those of threads are in the notebook's.
_names: dict[tuple[str, int], dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Cell:
    """Python code for ranks of a set, whose outputs go to a folder."""

    source: str
    filename: str
    ranks: tuple[int, ...]
    ranks_key: str
    folder: str
    owner: int

    def output(self, rank: int) -> Path:
        """Return the file for what a rank prints."""
        return Path(self.folder, f"output-{rank}")

    def cache_lines(self) -> None:
        """Register the lines for tracebacks of this process."""
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """Outcome of a cell in one rank: the text of its value, or its failure."""

    value: str | None
    failure: Failure | None
    is_out_of_step: bool
    """Whether a collective was left half-way."""


def run_cell(local_rank: int, cell: Cell) -> CellOutcome | None:
    """Run a cell in this rank."""
    del local_rank
    model = context.current_model()
    rank = model.topology.rank
    if rank not in cell.ranks:
        return None
    is_process = os.getpid() != cell.owner
    names = _namespace((cell.ranks_key, rank), model, is_process)
    value, error = None, None
    with captured(str(cell.output(rank)), is_process):
        try:
            with _interruptible(is_process):
                value = _execute(cell, names)
        except BaseException as raised:  # SystemExit too: the rank stays
            error = raised
    is_lost = context.current().interrupted is not None or leaves_out_of_step(error)
    return CellOutcome(value, None if error is None else describe(error), is_lost)


def _namespace(key: tuple[str, int], model: ComputationModel, is_process: bool) -> dict[str, Any]:
    if key not in _names:
        main = ModuleType("__main__")
        if is_process:
            sys.modules["__main__"] = main  # pickle looks for the cells' classes there
        topology = model.topology
        _names[key] = vars(main)
        _names[key].update(
            idist=unisono, rank=topology.rank, size=topology.world_size, __builtins__=builtins
        )
    return _names[key]


def _execute(cell: Cell, names: dict[str, Any]) -> str | None:
    """Run the statements; return the text of a last expression's value."""
    cell.cache_lines()
    tree = ast.parse(cell.source, cell.filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or cell.source.rstrip().endswith(";"):
        exec(compile(tree, cell.filename, "exec"), names)
        return None
    tree.body.pop()
    exec(compile(tree, cell.filename, "exec"), names)
    value = eval(compile(ast.Expression(last.value), cell.filename, "eval"), names)
    if value is None:
        return None
    names["_"] = value
    return repr(value)


@contextmanager
def _interruptible(is_process: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGINT."""
    if not is_process:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def make_context_again(local_rank: int, backend: str) -> None:
    """End the context, and create another one. Collective over all ranks."""
    del local_rank
    unisono.finalize()
    unisono.initialize(backend)


def defined_names(local_rank: int, ranks_key: str) -> list[str]:
    """List the names that cells have defined in this rank."""
    del local_rank
    names = _names.get((ranks_key, unisono.get_rank()), {})
    return sorted(name for name in names if not name.startswith("_") and name not in _READY)


def forget_names(ranks_key: str) -> None:
    """Remove the namespaces of a set whose ranks are threads of this process."""
    for key in [key for key in _names if key[0] == ranks_key]:
        del _names[key]
