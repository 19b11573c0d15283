"""One cell from its start to its end in all ranks: watched, and ended early where it must be."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from unisono.control.absent_ranks import named
from unisono.notebook.capture import by_thread
from unisono.notebook.cell import Cell, CellOutcome
from unisono.notebook.output import Transcript
from unisono.notebook.rank_set import RankSet

INTERRUPT, TIMEOUT, FAILURE = "interrupt", "timeout", "failure"
_TICK_S = 0.05
_ALONE_S = 1.0  # for the others, once a rank has failed
_PRESS_S = 0.3  # after an interrupt, until ranks are pressed
_LEAVE_S = 3.0  # after an interrupt that nobody waits for, until ranks are given up
_END_S = 10.0  # for ranks that have been given up


@dataclass(slots=True)
class Run:
    """How a cell went in the ranks that ran it.

    Args:
        size: number of ranks of the set.
        outcomes: by rank; one that was given up, or died, has none.
        error: how the ranks as a whole failed, if one died.
        cut_by: what ended it early, if anything did: `INTERRUPT`, `TIMEOUT` or `FAILURE`.
        stacks: where each rank was that didn't come back; empty where it says nothing.
        stays: what is left of the ranks, where anything went wrong.
    """

    size: int
    outcomes: dict[int, CellOutcome] = field(default_factory=dict)
    error: BaseException | None = None
    cut_by: str = ""
    stacks: dict[int, str] = field(default_factory=dict)
    stays: str = ""


def run(
    rank_set: RankSet, source: str, filename: str, ranks: Sequence[int], timeout_s: float | None
) -> Run:
    """Run a cell in ranks, and show what they print."""
    # Ctrl-C interrupts the ranks; a second one gives up those that didn't come back.
    rank_set.start()
    cell = rank_set.cell(source, filename, ranks)
    with by_thread() if rank_set.are_threads else nullcontext():
        return _Watch(rank_set, cell, timeout_s).run()


@contextmanager
def _noticing(interrupt: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        interrupt()


class _Watch:
    """States: running -> (interrupted -> pressed ->) over, or given up."""

    def __init__(self, rank_set: RankSet, cell: Cell, timeout_s: float | None) -> None:
        self._set = rank_set
        self._cell = cell
        paths = {rank: cell.output(rank) for rank in cell.ranks}
        self._transcript = Transcript(paths, rank_set.size)
        self._result = Run(rank_set.size)
        self._timeout_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._failed_at: float | None = None
        self._cut_at = 0.0
        self._is_pressed = self._is_given_up = False
        self._began_late: list[int] = []  # ranks that an interrupt may have come too early for
        self._call = rank_set.begin(cell)

    def run(self) -> Run:
        try:
            self._wait()
        except BaseException:  # an interrupt of what handles interrupts
            self._set.give_up(self._late)
            raise
        finally:
            self._transcript.show(is_over=True)
            self._transcript.close()
        self._take_outcomes()
        result = self._result
        result.stacks = {rank: result.stacks.get(rank, "") for rank in self._late}
        if self._is_given_up:
            return result
        result.error = self._call.error
        if result.error is not None:
            result.stays = self._set.forget()
            return result
        if self._set.has_lost_names(result.outcomes):
            result.stays = "The ranks had ended since the last cell: these are fresh, without names"
        if result.cut_by or self._may_be_out_of_step():
            result.stays = self._set.settle(result.outcomes)
        return result

    def _may_be_out_of_step(self) -> bool:
        outcomes = self._result.outcomes.values()
        have_failed = {outcome.failure is not None for outcome in outcomes}
        return len(have_failed) > 1 or any(outcome.is_out_of_step for outcome in outcomes)

    @property
    def _late(self) -> list[int]:
        return [rank for rank in self._cell.ranks if rank not in self._result.outcomes]

    def _wait(self) -> None:
        is_over = False
        while not is_over and not self._is_given_up:
            with _noticing(self._interrupt):
                is_over = self._call.is_over(_TICK_S)
                self._transcript.show()
                self._take_outcomes()
                self._look(time.monotonic())

    def _take_outcomes(self) -> None:
        for rank in self._late:
            path: Path = self._cell.outcome(rank)
            if path.exists():
                self._result.outcomes[rank] = pickle.loads(path.read_bytes())

    def _look(self, now: float) -> None:
        """End the cell early where it is late, or where ranks may wait for one that has failed."""
        result = self._result
        if not self._late:
            return
        if any(outcome.failure is not None for outcome in result.outcomes.values()):
            self._failed_at = self._failed_at or now
        if result.cut_by:
            self._press(now)
        elif self._timeout_at is not None and now >= self._timeout_at:
            self._cut(TIMEOUT)
        elif self._failed_at is not None and now >= self._failed_at + _ALONE_S:
            self._cut(FAILURE)

    def _interrupt(self) -> None:
        if self._result.cut_by == INTERRUPT:
            self._give_up()
        else:
            self._cut(INTERRUPT)

    def _cut(self, reason: str) -> None:
        self._result.cut_by = reason
        self._cut_at = time.monotonic()
        self._began_late = [rank for rank in self._late if not self._cell.stack(rank).exists()]
        self._set.interrupt(self._late, is_pressed=False)

    def _press(self, now: float) -> None:
        if not self._is_pressed and now >= self._cut_at + _PRESS_S:
            self._is_pressed = True
            if self._set.are_threads:  # then those that wait come back, and the others may not
                self._keep_stacks()
                self._set.interrupt(self._late, is_pressed=True)
            else:
                self._set.interrupt(self._began_late, is_pressed=True)
            if self._result.cut_by == INTERRUPT:
                print(f"{named(self._late)} can't stop yet: interrupt again to end what is left")
        if self._result.cut_by != INTERRUPT and now >= self._cut_at + _LEAVE_S:
            self._give_up()

    def _keep_stacks(self) -> None:
        for rank in self._late:
            self._result.stacks[rank] = self._set.stack(rank, self._cell)

    def _give_up(self) -> None:
        self._is_given_up = True
        late = self._late
        self._keep_stacks()
        self._result.stays = self._set.give_up(late)
        if not self._set.are_threads:
            self._call.is_over(_END_S)
