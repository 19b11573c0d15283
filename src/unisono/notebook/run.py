"""One cell in all ranks, watched from its start to its end, and ended early if need be."""

from __future__ import annotations

import ctypes
import pickle
import signal
import threading
import time
from dataclasses import dataclass, field
from traceback import StackSummary

from unisono.notebook.cell import Cell, CellOutcome, run_cell
from unisono.notebook.output import Transcript
from unisono.pool.call import PoolCall
from unisono.pool.pool import WorkerPool, outcome
from unisono.topology import named
from unisono.tracebacks import fold_text, is_ours

INTERRUPT, TIMEOUT, FAILURE = "interrupt", "timeout", "failure"
_TICK_S = 0.05
_ALONE_S = 1.0  # for the others, once a rank has failed, and after an interrupt
_LEAVE_S = 3.0  # after an interrupt by a timeout or a failure, until ranks are ended
_END_S = 10.0  # for ranks that have been killed
_WENT_ON = "it was done in spite of the interrupt\n"


@dataclass(slots=True)
class Run:
    """Outcome of a cell in the ranks that ran it."""

    size: int
    outcomes: dict[int, CellOutcome] = field(default_factory=dict)
    error: BaseException | None = None
    """Error of the ranks as a whole, if one died."""
    cut_by: str = ""
    """Why it was ended early: `INTERRUPT`, `TIMEOUT` or `FAILURE`; else empty."""
    stacks: dict[int, str] = field(default_factory=dict)
    """Stacks of interrupted ranks; empty without an answer."""
    is_aborted: bool = False
    """Whether the contexts of ranks that are threads were ended."""
    late: list[int] = field(default_factory=list)
    """Ranks that were given up."""
    stays: str = ""
    """What stays of the ranks, if the cell failed or was ended early."""


class Watch:
    """A cell in ranks: Ctrl-C interrupts them, a second one gives up those that are late."""

    def __init__(self, pool: WorkerPool, cell: Cell, size: int, timeout_s: float | None) -> None:
        self._pool = pool
        self._cell = cell
        self._call: PoolCall | None = None
        self._is_over = threading.Event()  # an interrupted join takes its thread for ended: 3.11
        self._result = Run(size)
        paths = {rank: cell.output(rank) for rank in cell.ranks}
        self._transcript = Transcript(paths, size)
        self._timeout_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._failed_at: float | None = None
        self._cut_at = 0.0
        self._is_begun = self._is_told = False
        self._turn = threading.Lock()  # held by the first thread that runs

    def run(self) -> Run:
        """Run the cell, which another thread waits for, and show the ranks' output."""
        try:
            while not self._is_over.is_set() and not self._result.late:
                self._tick()
        finally:  # also after an interrupt of the handling of another one
            if not self._is_over.is_set() and not self._result.late:
                self._give_up()
            self._take_outcomes()
            self._transcript.show(is_over=True)
            self._transcript.close()
        for rank in [rank for rank, stack in self._result.stacks.items() if not stack]:
            if (ended := self._result.outcomes.get(rank)) is not None:
                self._result.stacks[rank] = ended.failure.traceback if ended.failure else _WENT_ON
        self._result.outcomes = dict(sorted(self._result.outcomes.items()))
        return self._result

    def _work(self) -> None:
        if not self._turn.acquire(blocking=False):  # Ctrl-C came while another one was started
            return
        result = self._result
        try:
            result.error = outcome(self._pool, run_cell, (self._cell,), begun=self._begun).error
        except BaseException as error:
            result.error = error
        finally:
            self._is_over.set()

    def _begun(self, call: PoolCall) -> None:
        self._call = call

    def _tick(self) -> None:
        try:
            if not self._is_begun:
                threading.Thread(target=self._work, daemon=True).start()
                self._is_begun = True
            self._is_over.wait(_TICK_S)
            self._transcript.show()
            self._take_outcomes()
            if self._late and not self._is_over.is_set():
                self._look(time.monotonic())
        except KeyboardInterrupt:
            if self._result.cut_by == INTERRUPT:
                self._give_up()
            else:
                self._cut(INTERRUPT)

    def _take_outcomes(self) -> None:
        for rank, bodies in list(self._call.answers.items() if self._call else ()):
            if rank in self._cell.ranks and rank not in self._result.outcomes:
                self._result.outcomes[rank] = pickle.loads(bodies[0])

    @property
    def _late(self) -> list[int]:
        return [rank for rank in self._cell.ranks if rank not in self._result.outcomes]

    def _look(self, now: float) -> None:
        """End the cell early if it is late, or if ranks may wait for one that has failed."""
        result = self._result
        if any(outcome.failure is not None for outcome in result.outcomes.values()):
            self._failed_at = self._failed_at or now
        if result.cut_by == INTERRUPT and now >= self._cut_at + _ALONE_S and not self._is_told:
            self._is_told = True
            if self._call is not None:
                self._call.replicas.signal(self._late, signal.SIGINT)  # the first may be too early
            print(f"{named(self._late)} can't stop yet: interrupt again to end what is left")
        elif result.cut_by:
            if result.cut_by != INTERRUPT and now >= self._cut_at + _LEAVE_S:
                self._give_up()
        elif self._timeout_at is not None and now >= self._timeout_at:
            self._cut(TIMEOUT)
        elif self._failed_at is not None and now >= self._failed_at + _ALONE_S:
            self._cut(FAILURE)

    def _cut(self, reason: str) -> None:
        """Interrupt the ranks that are late."""
        self._result.cut_by = reason
        self._cut_at = time.monotonic()
        if self._call is None:
            return
        replicas, late = self._call.replicas, self._late
        if replicas.are_processes:  # their tracebacks show where they were
            self._result.stacks = dict.fromkeys(late, "")
            replicas.signal(late, signal.SIGINT)
            return
        computing = self._keep_stacks(late)
        for rank in computing:
            thread_id = ctypes.c_ulong(replicas.thread_of(rank))
            kind = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, kind)
        if len(computing) < len(late):  # the others wait in a collective, and raise there
            self._result.is_aborted = True
            replicas.abort()

    def _keep_stacks(self, ranks: list[int]) -> list[int]:
        """Record the stacks of ranks, and return those outside our calls."""
        assert self._call is not None
        computing = []
        for rank, frames in self._call.replicas.stacks(ranks).items():
            names = [frame.filename for frame in frames]
            own = frames[names.index(self._cell.filename) if self._cell.filename in names else 0 :]
            text = fold_text("".join(StackSummary.from_list(own).format()))
            self._result.stacks[rank] = text and f"Traceback (most recent call last):\n{text}"
            computing += [] if any(is_ours(frame.filename) for frame in own) else [rank]
        return computing

    def _give_up(self) -> None:
        """End all ranks that are processes; threads run on."""
        self._result.late = self._late
        if self._call is not None and self._call.replicas.are_processes:
            self._keep_stacks(self._result.late)
            self._call.replicas.signal(range(self._result.size), signal.SIGKILL)
            self._is_over.wait(_END_S)
