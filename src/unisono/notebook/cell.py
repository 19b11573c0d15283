"""A cell in one rank, which runs in the rank's own namespace and prints to a file."""

from __future__ import annotations

import ast
import builtins
import linecache
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import unisono
from unisono import context
from unisono.launchers.job.failure import Failure
from unisono.launchers.job.lifetime import output_redirected
from unisono.launchers.job.output import ByThread
from unisono.launchers.job.worker import describe
from unisono.model.contract import ComputationModel
from unisono.pool.worker import leaves_out_of_step
from unisono.tracebacks import hides

__tracebackhide__ = hides

_READY = ("idist", "rank", "size")
# Namespaces of cells by set of ranks and rank, in the process that runs the rank: for ranks that
# are threads, that is the notebook's.
_names: dict[tuple[str, int], dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Cell:
    """Python code for ranks of a set, whose outputs go to a folder."""

    source: str
    filename: str
    ranks: tuple[int, ...]
    ranks_key: str  # identifies the set of ranks
    folder: str
    owner: int  # pid of the notebook

    def output(self, rank: int) -> Path:
        """Return the file of a rank's output."""
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
    is_out_of_step: bool  # whether a collective was left half-way


def run_cell(_local_rank: int, cell: Cell) -> CellOutcome | None:
    """Run a cell in this rank, and return its outcome; None if it is only for other ranks."""
    model = context.current_model()
    rank = model.topology.rank
    if rank not in cell.ranks:
        return None
    is_process = os.getpid() != cell.owner
    names = _namespace((cell.ranks_key, rank), model, is_process)
    value, error = None, None
    with _captured(cell.output(rank), is_process):
        try:
            with _interruptible(is_process):
                value = _execute(cell, names)
        except BaseException as raised:  # also SystemExit, which doesn't end the rank
            error = raised
    is_out_of_step = context.current().interrupted is not None or leaves_out_of_step(error)
    return CellOutcome(value, None if error is None else describe(error), is_out_of_step)


def _namespace(key: tuple[str, int], model: ComputationModel, is_process: bool) -> dict[str, Any]:
    """Return the namespace of a rank's cells, which its first cell creates."""
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
    """Run the statements; return the text of the value if the last one is an expression."""
    cell.cache_lines()
    tree = ast.parse(cell.source, cell.filename)
    last = tree.body[-1] if tree.body else None
    # As in IPython, a final ";" hides the value, and the name "_" keeps it.
    if isinstance(last, ast.Expr) and not cell.source.rstrip().endswith(";"):
        tree.body.pop()
    else:
        last = None
    exec(compile(tree, cell.filename, "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), cell.filename, "eval"), names)
    if value is None:
        return None
    names["_"] = value
    return repr(value)


@contextmanager
def _interruptible(is_process: bool) -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGINT."""
    # Outside of the block a rank's process ignores SIGINT, because Ctrl-C signals the notebook's
    # whole process group. Ranks that are threads share the notebook's handler, in its main thread.
    if not is_process:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def by_thread() -> Iterator[None]:
    """Capture the output of each rank that is a thread of this process separately."""
    out: Any = ByThread(sys.stdout)
    err: Any = ByThread(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def _captured(path: Path, is_process: bool) -> Iterator[None]:
    """Append this rank's output to a file; in a process, also that of C code and children."""
    with (
        path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace") as file,
        _descriptors(file.fileno()) if is_process else _streams(file),
    ):
        yield


@contextmanager
def _descriptors(target: int) -> Iterator[None]:
    """Send the output of this process, C code and children included, to a file."""
    # The notebook reads the file while the cell runs, so lines mustn't stay in a buffer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with output_redirected(target):
        yield


@contextmanager
def _streams(file: TextIO) -> Iterator[None]:
    """Send what this thread prints to a file: see `by_thread`."""
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, ByThread)]
    own = threading.get_ident()
    for stream in streams:
        stream.streams[own] = file
    try:
        yield
    finally:
        for stream in streams:
            stream.streams.pop(own, None)


def recreate_context(_local_rank: int, backend: str) -> None:
    """End the context, and create another one. Collective over all ranks."""
    unisono.finalize()
    unisono.initialize(backend)


def defined_names(_local_rank: int, ranks_key: str) -> list[str]:
    """List the names that cells have defined in this rank."""
    names = _names.get((ranks_key, unisono.get_rank()), {})
    return sorted(name for name in names if not name.startswith("_") and name not in _READY)


def forget_names(ranks_key: str) -> None:
    """Remove the namespaces of a set whose ranks are threads of this process."""
    for key in [key for key in _names if key[0] == ranks_key]:
        del _names[key]
