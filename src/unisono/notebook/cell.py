"""The rank's side of a cell: runs it in the rank's own namespace, and says how that went."""

from __future__ import annotations

import ast
import builtins
import ctypes
import faulthandler
import linecache
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import unisono
from unisono import context
from unisono.deadlines import deadline
from unisono.errors import CollectiveError
from unisono.launchers.job.failure import Failure
from unisono.launchers.job.worker import describe
from unisono.model.contract import ComputationModel
from unisono.notebook.capture import captured
from unisono.pool.worker import leaves_out_of_step
from unisono.tracebacks import hides

__tracebackhide__ = hides

_READY = ("idist", "rank", "size")
_STEP_S = 2.0  # for ranks that may be out of step
# By set of ranks and rank. A rank that is a process has its own; threads keep them in the notebook.
_names: dict[tuple[str, int], dict[str, Any]] = {}
_running: dict[tuple[str, int], tuple[int, ComputationModel]] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Cell:
    """What ranks are to run.

    Args:
        source: Python code.
        filename: its name in tracebacks.
        ranks: those that run it.
        ranks_key: names the set of ranks, and so their namespaces.
        folder: where outputs and outcomes go.
        owner: id of the notebook's process.
    """

    source: str
    filename: str
    ranks: tuple[int, ...]
    ranks_key: str
    folder: str
    owner: int

    def output(self, rank: int) -> Path:
        """Return the file for what a rank prints."""
        return Path(self.folder, f"output-{rank}")

    def stack(self, rank: int) -> Path:
        """Return the file where a rank writes its stack on SIGUSR1."""
        return Path(self.folder, f"stack-{rank}")

    def outcome(self, rank: int) -> Path:
        """Return the file for how a rank's part went."""
        return Path(self.folder, f"outcome-{rank}")


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """How a cell went in one rank.

    Args:
        value: the last expression's, as text; None where there is none.
        failure: the exception, if it raised one.
        is_interrupted: whether that was KeyboardInterrupt.
        is_out_of_step: whether a collective was left half-way.
        is_fresh: whether the rank's namespace was new.
    """

    value: str | None
    failure: Failure | None
    is_interrupted: bool
    is_out_of_step: bool
    is_fresh: bool


def run_cell(local_rank: int, cell: Cell) -> None:
    """Run a cell in this rank, and leave its outcome in a file."""
    model = context.current_model()
    rank = model.topology.rank
    if rank not in cell.ranks:
        return
    is_process = os.getpid() != cell.owner
    key = cell.ranks_key, rank
    is_fresh = key not in _names
    names = _namespace(key, model, is_process)
    value, error = None, None
    with captured(str(cell.output(rank)), is_process):
        try:
            with _interruptible(key, model), _answering(cell.stack(rank), is_process):
                value = _execute(cell, names)
        except BaseException as raised:  # SystemExit too: the rank stays
            error = raised
    is_lost = context.current().interrupted is not None or leaves_out_of_step(error)
    failure = None if error is None else describe(error)
    is_interrupted = isinstance(error, KeyboardInterrupt)
    _leave(cell.outcome(rank), CellOutcome(value, failure, is_interrupted, is_lost, is_fresh))


def _namespace(key: tuple[str, int], model: ComputationModel, is_process: bool) -> dict[str, Any]:
    if key not in _names:
        main = ModuleType("__main__")
        if is_process:
            sys.modules["__main__"] = main  # where pickle looks for the cells' classes
        topology = model.topology
        _names[key] = vars(main)
        _names[key].update(
            idist=unisono, rank=topology.rank, size=topology.world_size, __builtins__=builtins
        )
    return _names[key]


def _execute(cell: Cell, names: dict[str, Any]) -> str | None:
    """Run the statements; give the text of a last expression's value."""
    lines = cell.source.splitlines(keepends=True)
    linecache.cache[cell.filename] = (len(cell.source), None, lines, cell.filename)
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
def _interruptible(key: tuple[str, int], model: ComputationModel) -> Iterator[None]:
    """Let the notebook interrupt the block, where this rank is a thread of it."""
    with _lock:
        _running[key] = threading.get_ident(), model
    try:
        yield
    finally:
        with _lock:
            own, _ = _running.pop(key)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(own), None)  # came too late


@contextmanager
def _answering(stack: Path, is_process: bool) -> Iterator[None]:
    """Let signals of the notebook interrupt the block, and ask where it is."""
    if not is_process:
        yield
        return
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            faulthandler.unregister(signal.SIGUSR1)


def _leave(path: Path, outcome: CellOutcome) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(outcome))
    draft.replace(path)


def interrupt_thread(ranks_key: str, rank: int, *, leaves_collective: bool) -> None:
    """Interrupt a rank that is a thread of this process, if it runs a cell."""
    with _lock:
        thread_id, model = _running.get((ranks_key, rank), (None, None))
        if thread_id is None or model is None:
            return
        kind = ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), kind)
    if leaves_collective:
        model.abort()


def threads_of(ranks_key: str) -> dict[int, int]:
    """Return the thread of each rank of a set that runs a cell in this process."""
    with _lock:
        return {rank: own for (key, rank), (own, _) in _running.items() if key == ranks_key}


def are_in_step(local_rank: int) -> bool:
    """Return whether the ranks can still meet. Collective over all ranks."""
    del local_rank
    try:
        with deadline(_STEP_S):
            unisono.barrier()
    except CollectiveError:
        return False
    return True


def renew(local_rank: int, backend: str | None) -> None:
    """End the context, and make another one. Collective over all ranks."""
    del local_rank
    unisono.finalize()
    unisono.initialize(backend)


def defined_names(local_rank: int, ranks_key: str) -> list[str]:
    """List the names that cells have defined in this rank."""
    del local_rank
    names = _names.get((ranks_key, unisono.get_rank()), {})
    return sorted(name for name in names if not name.startswith("_") and name not in _READY)


def forget_names(ranks_key: str) -> None:
    """Drop the namespaces of a set whose ranks are threads of this process."""
    for key in [key for key in _names if key[0] == ranks_key]:
        del _names[key]
