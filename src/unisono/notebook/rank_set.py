"""A set of warm ranks that run cells: a pool, and the namespaces of its cells."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress

from unisono.deadlines import deadline
from unisono.errors import UnisonoError
from unisono.notebook.capture import by_thread
from unisono.notebook.cell import Cell, defined_names, forget_names, make_context_again
from unisono.notebook.run import Run, Watch
from unisono.pool.pool import WorkerPool, end_replicas
from unisono.topology import named

_SETTLE_S = 20.0  # for ranks to create their context again
_LOST = "their names are lost. The next cell makes fresh ranks"
_STAY = "The ranks and all their names stay"
_AGAIN = (
    "A collective was left half-way, so that their context was made again: make groups and wrapped "
    "models (DDP) again"
)


class RankSet:
    """Ranks of one backend, and the namespaces of their cells."""

    def __init__(self, backend: str, size: int) -> None:
        self.size: int = size
        self._backend = backend
        self._key = secrets.token_hex(8)
        self._has_names = False
        self._pool = self._new_pool()
        self._folder = tempfile.mkdtemp(prefix="unisono-cells-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def _new_pool(self) -> WorkerPool:
        return WorkerPool(self._backend, self.size, prefix_output=False)

    def __str__(self) -> str:
        return f"{self.size} rank{'s' * (self.size > 1)} on {self._backend}"

    def describe(self) -> str:
        """Return a text about the ranks, and the names that cells have defined in them."""
        pids = self._pool.pids
        if not pids:
            return f"{self}: not started"
        is_here = {*pids} == {os.getpid()}
        where = "threads of this process" if is_here else f"processes {pids}"
        defined = self._pool.run(defined_names, self._key)
        common = sorted(set.intersection(*map(set, defined)))
        lines = [f"{self}: warm, {where}; names in all ranks: {', '.join(common) or 'none'}"]
        for rank, names in enumerate(defined):
            own = [name for name in names if name not in common]
            lines += [f"  rank {rank} alone or with others: {', '.join(own)}"] if own else []
        return "\n".join(lines)

    def close(self) -> str:
        """End the ranks; their names are lost."""
        forget_names(self._key)
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._pool.close()
        except UnisonoError as error:  # as on MPI after a collective that was left half-way
            return f"ended, but not in good order: {str(error).splitlines()[0]}"
        return "ended"

    def run(self, source: str, filename: str, ranks: Sequence[int], timeout_s: float | None) -> Run:
        """Run a cell in ranks, and show their output."""
        if not self._pool.pids:
            if self._has_names:
                print("The ranks had ended since the last cell: these are fresh, without names")
            self._pool.map(abs, range(self.size))
        are_threads = {*self._pool.pids} == {os.getpid()}
        for old in os.scandir(self._folder):
            os.unlink(old)
        cell = Cell(source, filename, tuple(ranks), self._key, self._folder, os.getpid())
        cell.cache_lines()
        with by_thread() if are_threads else nullcontext():
            result = Watch(self._pool, cell, self.size, timeout_s).run()
        result.stays = self._settle(result, are_threads)
        self._has_names = not are_threads and bool(self._pool.pids)
        return result

    def _settle(self, result: Run, are_threads: bool) -> str:
        """Replace ranks or contexts that a failed cell left unusable, and return what stays."""
        is_lost = result.is_aborted
        is_lost |= any(outcome.is_out_of_step for outcome in result.outcomes.values())
        if not (result.cut_by or result.error or is_lost):
            return ""
        again = f"{_STAY}. {_AGAIN}" if is_lost else _STAY
        late = named(result.late) if result.late else ""
        if are_threads and not (late or is_lost or result.error):
            return _STAY
        if are_threads:
            if not late:
                end_replicas(self._pool)
            self._pool = self._new_pool()
            return f"{late} can't be interrupted there: left to itself. {_STAY}" if late else again
        if late:
            return f"{late} of {self.size} didn't come back: all ranks have been ended, and {_LOST}"
        if result.error:
            return f"All ranks have ended, and {_LOST}"
        if is_lost:
            with suppress(UnisonoError), deadline(_SETTLE_S):
                self._pool.run(make_context_again, self._backend)
                return again
            end_replicas(self._pool)
            return f"The ranks' context could not be made again: they have been ended, and {_LOST}"
        return again
