"""A set of warm ranks that run cells, and the run of one cell."""

from __future__ import annotations

import ctypes
import os
import pickle
import secrets
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from traceback import StackSummary

from unisono.deadlines import deadline
from unisono.errors import UnisonoError
from unisono.notebook.cell import (
    Cell,
    CellOutcome,
    by_thread,
    defined_names,
    forget_names,
    recreate_context,
    run_cell,
)
from unisono.notebook.output import Transcript
from unisono.pool.call import PoolCall
from unisono.pool.pool import WorkerPool, end_replicas, outcome
from unisono.topology import named
from unisono.tracebacks import fold_text, is_ours

INTERRUPT, TIMEOUT, FAILURE = "interrupt", "timeout", "failure"
_TICK_S = 0.05  # between two looks at the output and the limits
_ALONE_S = 1.0  # for late ranks after another one's failure, and after an interrupt
_LEAVE_S = 3.0  # from an interrupt by a timeout or a failure to the end of late ranks
_END_S = 10.0  # for killed ranks to end
_SETTLE_S = 20.0  # for ranks to create their context again
_WENT_ON = "it was done in spite of the interrupt\n"
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
        self._key = secrets.token_hex(8)  # of this set in `cell._names`
        self._has_names = False  # whether names of cells are lost if the ranks end
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
        """End the ranks, whose names are lost; return how they ended."""
        forget_names(self._key)
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._pool.close()
        except UnisonoError as error:  # as on MPI after a collective that was left half-way
            return f"ended, but not in good order: {str(error).splitlines()[0]}"
        return "ended"

    def run(
        self, source: str, filename: str, ranks: Sequence[int], timeout_s: float | None
    ) -> CellRun:
        """Run a cell in ranks, and show their output."""
        if not self._pool.pids:
            if self._has_names:
                print("The ranks had ended since the last cell: these are fresh, without names")
            self._pool.map(abs, range(self.size))  # starts the ranks before the cell's time counts
        are_threads = {*self._pool.pids} == {os.getpid()}
        # Each cell's files have the same names, and ranks append to them.
        for old in os.scandir(self._folder):
            os.unlink(old)
        cell = Cell(source, filename, tuple(ranks), self._key, self._folder, os.getpid())
        cell.cache_lines()
        run = CellRun(cell, self.size, timeout_s)
        with by_thread() if are_threads else nullcontext():
            run.wait(self._pool)
        run.remains = self._settle(run, are_threads)
        # The names of threads are in this process, so they outlive their ranks.
        self._has_names = not are_threads and bool(self._pool.pids)
        return run

    def _settle(self, run: CellRun, are_threads: bool) -> str:
        """Replace ranks or contexts that a failed cell left unusable, and return what remains."""
        is_lost = run.is_aborted or any(each.is_out_of_step for each in run.outcomes.values())
        if not (run.cut_by or run.error or is_lost):
            return ""
        again = f"{_STAY}. {_AGAIN}" if is_lost else _STAY
        late = named(run.given_up) if run.given_up else ""
        if are_threads:  # their names are in this process, so that new threads have them, too
            if not late and (is_lost or run.error):
                end_replicas(self._pool)
            if late:  # it continues the call, which holds the pool's lock
                self._pool = self._new_pool()
            return f"{late} can't be interrupted there: left to itself. {_STAY}" if late else again
        if late:
            return f"{late} of {self.size} didn't come back: all ranks have been ended, and {_LOST}"
        if run.error:
            return f"All ranks have ended, and {_LOST}"
        if is_lost:
            with suppress(UnisonoError), deadline(_SETTLE_S):
                self._pool.run(recreate_context, self._backend)
                return again
            end_replicas(self._pool)
            return f"The ranks' context could not be made again: they have been ended, and {_LOST}"
        return again


class CellRun:
    """One run of a cell: Ctrl-C interrupts its ranks, a second Ctrl-C gives up late ones."""

    def __init__(self, cell: Cell, size: int, timeout_s: float | None) -> None:
        self.size: int = size
        self.timeout_s: float | None = timeout_s
        self.outcomes: dict[int, CellOutcome] = {}
        self.error: BaseException | None = None  # of the ranks as a whole, if one died
        self.cut_by: str = ""  # `INTERRUPT`, `TIMEOUT` or `FAILURE`, if one of them ended the cell
        self.stacks: dict[int, str] = {}  # of interrupted ranks; "" without an answer
        self.is_aborted: bool = False  # whether the contexts of ranks that are threads were ended
        self.given_up: list[int] = []
        self.remains = ""  # what is left of the ranks, if the cell failed or was ended early
        self._cell = cell
        self._call: PoolCall | None = None  # while the cell runs
        # An event, because Python 3.11 marks a thread as ended if its join is interrupted.
        self._is_over = threading.Event()
        self._transcript = Transcript({rank: cell.output(rank) for rank in cell.ranks}, size)
        self._timeout_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._failed_at: float | None = None
        self._cut_at = 0.0
        # Whether the cell's thread was started; whether late ranks were interrupted again.
        self._is_started = self._is_repeated = False
        self._turn = threading.Lock()  # held by the first thread that runs the cell

    def wait(self, pool: WorkerPool) -> None:
        """Wait for the cell, which another thread runs, and show the ranks' output."""
        try:
            while not self._is_over.is_set() and not self.given_up:
                self._tick(pool)
        finally:  # also if a second Ctrl-C interrupts the handling of the first one
            if not self._is_over.is_set() and not self.given_up:
                self._give_up()
            self._take_outcomes()
            # An error's traceback refers to this object, and so would keep threads given up.
            self._call = None
            self._transcript.show(is_over=True)
            self._transcript.close()
        for rank, stack in self.stacks.items():
            if not stack and rank in self.outcomes:
                failure = self.outcomes[rank].failure
                self.stacks[rank] = failure.traceback if failure else _WENT_ON
        self.outcomes = dict(sorted(self.outcomes.items()))

    def _work(self, pool: WorkerPool) -> None:
        """Run the cell until all ranks are done; the body of its thread."""
        if not self._turn.acquire(blocking=False):  # a Ctrl-C made `_tick` start two threads
            return
        try:
            self.error = outcome(pool, run_cell, (self._cell,), on_start=self._keep_call).error
        except BaseException as error:
            self.error = error
        finally:
            self._is_over.set()

    def _keep_call(self, call: PoolCall) -> None:
        self._call = call

    def _tick(self, pool: WorkerPool) -> None:
        """Wait briefly for the cell, show output, and check the limits or Ctrl-C."""
        try:
            if not self._is_started:
                # The call runs in another thread, because this one receives Ctrl-C.
                threading.Thread(target=self._work, args=(pool,), daemon=True).start()
                self._is_started = True
            self._is_over.wait(_TICK_S)
            self._transcript.show()
            self._take_outcomes()
            if self._late and not self._is_over.is_set():
                self._check_limits(time.monotonic())
        except KeyboardInterrupt:
            if self.cut_by == INTERRUPT:
                self._give_up()
            else:
                self._cut(INTERRUPT)

    def _take_outcomes(self) -> None:
        # The list is a copy, because the call's thread may add answers.
        for rank, bodies in list(self._call.answers.items() if self._call else ()):
            if rank in self._cell.ranks and rank not in self.outcomes:
                self.outcomes[rank] = pickle.loads(bodies[0])

    @property
    def _late(self) -> list[int]:
        return [rank for rank in self._cell.ranks if rank not in self.outcomes]

    def _check_limits(self, now: float) -> None:
        """End the cell early if it is late, or if ranks may wait for one that has failed."""
        if any(each.failure is not None for each in self.outcomes.values()):
            self._failed_at = self._failed_at or now
        if self.cut_by == INTERRUPT:
            if now >= self._cut_at + _ALONE_S and not self._is_repeated:
                self._is_repeated = True
                if self._call is not None:
                    # A rank that hadn't begun the cell has ignored the first signal.
                    self._call.replicas.signal(self._late, signal.SIGINT)
                print(f"{named(self._late)} can't stop yet: interrupt again to end what is left")
        elif self.cut_by:
            if now >= self._cut_at + _LEAVE_S:
                self._give_up()
        elif self._timeout_at is not None and now >= self._timeout_at:
            self._cut(TIMEOUT)
        elif self._failed_at is not None and now >= self._failed_at + _ALONE_S:
            self._cut(FAILURE)

    def _cut(self, reason: str) -> None:
        """Interrupt the ranks that are late."""
        self.cut_by = reason
        self._cut_at = time.monotonic()
        if self._call is None:  # the cell hasn't been sent to the ranks yet
            return
        replicas, late = self._call.replicas, self._late
        if replicas.are_processes:  # `wait` fills in their tracebacks, which show where they were
            self.stacks = dict.fromkeys(late, "")
            replicas.signal(late, signal.SIGINT)
            return
        computing = self._keep_stacks(late)
        for rank in computing:
            thread_id = ctypes.c_ulong(replicas.thread_of(rank))
            error = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, error)
        if len(computing) < len(late):  # the rest wait in a collective, and raise there
            self.is_aborted = True
            replicas.abort()

    def _keep_stacks(self, ranks: list[int]) -> list[int]:
        """Record the stacks of ranks; return the ranks that are in no call of unisono."""
        assert self._call is not None
        computing = []
        for rank, frames in self._call.replicas.stacks(ranks).items():
            names = [frame.filename for frame in frames]
            # Frames before the cell's own are those of this package, which runs the cell.
            begin = names.index(self._cell.filename) if self._cell.filename in names else 0
            of_cell = frames[begin:]
            text = fold_text("".join(StackSummary.from_list(of_cell).format()))
            self.stacks[rank] = text and f"Traceback (most recent call last):\n{text}"
            if not any(is_ours(frame.filename) for frame in of_cell):
                computing.append(rank)
        return computing

    def _give_up(self) -> None:
        """End all ranks that are processes; threads run on."""
        self.given_up = self._late
        if self._call is not None and self._call.replicas.are_processes:
            self._keep_stacks(self.given_up)
            self._call.replicas.signal(range(self.size), signal.SIGKILL)
            self._is_over.wait(_END_S)
