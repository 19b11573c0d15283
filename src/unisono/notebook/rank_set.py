"""A set of warm ranks: runs cells in them, interrupts them, and says what stays."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from unisono.control.absent_ranks import named, stack_of
from unisono.deadlines import deadline
from unisono.errors import UnisonoError
from unisono.notebook.cell import (
    Cell,
    CellOutcome,
    are_in_step,
    defined_names,
    forget_names,
    interrupt_thread,
    renew,
    run_cell,
    threads_of,
)
from unisono.pool.pool import WorkerPool
from unisono.tracebacks import is_ours

T = TypeVar("T")
_FRAME = re.compile(r'  File "([^"]*)"')
_TICK_S = 0.02
_STACK_S = 0.5  # for a process to write where it is
_SETTLE_S = 20.0  # to find out whether ranks are in step, or to make their context again


class BackgroundCall:
    """A call of a pool in a thread of its own, so that this one can be interrupted meanwhile."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.value: Any = None
        self._is_over = threading.Event()  # a join that is interrupted forgets its thread: 3.11
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self.value = call()
        except BaseException as error:
            self.error = error
        finally:
            self._is_over.set()

    def is_over(self, within_s: float) -> bool:
        """Wait for the end for so many seconds, and tell whether it has come."""
        return self._is_over.wait(within_s)


class RankSet:
    """Ranks of one backend, and the namespaces that cells have in them."""

    def __init__(self, backend: str, size: int) -> None:
        self.size: int = size
        self._backend = backend
        self._key = secrets.token_hex(8)
        self._named: set[int] = set()  # ranks that have a namespace
        self._pool = WorkerPool(backend, size, prefix_output=False)
        self.are_threads: bool = False
        """Whether the ranks are threads of this process, as far as there have been any."""
        self._folder = tempfile.mkdtemp(prefix="unisono-cells-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def is_warm(self) -> bool:
        """Whether the ranks are there."""
        return bool(self._pool.pids)

    def __str__(self) -> str:
        return f"{self.size} rank{'s' * (self.size > 1)} on {self._backend}"

    def describe(self) -> str:
        """Say which ranks there are, and what cells have defined in them."""
        if not self.is_warm:
            return f"{self}: not started"
        pids = self._pool.pids
        where = "threads of this process" if self.are_threads else f"processes {pids}"
        defined = self._pool.run(defined_names, self._key)
        common = sorted(set.intersection(*map(set, defined)))
        lines = [f"{self}: warm, {where}; names in all ranks: {', '.join(common) or 'none'}"]
        for rank, names in enumerate(defined):
            own = [name for name in names if name not in common]
            lines += [f"  rank {rank} alone or with others: {', '.join(own)}"] if own else []
        return "\n".join(lines)

    def start(self) -> None:
        """Make the ranks, unless they are there."""
        if not self.is_warm:
            self._pool.map(abs, range(self.size))
            self.are_threads = set(self._pool.pids) == {os.getpid()}

    def close(self) -> str:
        """End the ranks; their names are lost."""
        forget_names(self._key)
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._pool.close()
        except UnisonoError as error:  # as on MPI after a collective that was left half-way
            return f"ended, but not in good order: {str(error).splitlines()[0]}"
        return "ended"

    def begin(self, cell: Cell) -> BackgroundCall:
        """Run a cell in the ranks; doesn't wait."""
        return BackgroundCall(partial(self._pool.run, run_cell, cell))

    def cell(self, source: str, filename: str, ranks: Sequence[int]) -> Cell:
        """Make a cell of this set, whose folder is empty."""
        for old in os.scandir(self._folder):
            os.unlink(old)
        return Cell(source, filename, tuple(ranks), self._key, self._folder, os.getpid())

    def has_lost_names(self, outcomes: Mapping[int, CellOutcome]) -> bool:
        """Return whether the ranks of a cell were fresh where others had run cells before."""
        lost = {rank for rank, outcome in outcomes.items() if outcome.is_fresh} & self._named
        self._named |= set(outcomes)
        return bool(lost)

    def interrupt(self, ranks: Sequence[int], *, is_pressed: bool) -> None:
        """Interrupt ranks at what they do."""
        if self.are_threads:
            for rank in ranks:
                interrupt_thread(self._key, rank, leaves_collective=is_pressed)
            return
        pids = self._pool.pids
        for rank in ranks:
            self._signal(pids[rank] if pids else None, signal.SIGINT)

    def give_up(self, ranks: Sequence[int]) -> str:
        """End ranks that don't come back."""
        who = f"{named(ranks)} of {self.size}"
        if self.are_threads:
            self._pool = WorkerPool(self._backend, self.size, prefix_output=False)
            return (
                f"{who} can't be interrupted there: the thread is left to itself. All names stay; "
                "the next cell runs in fresh threads"
            )
        for pid in self._pool.pids:
            self._signal(pid, signal.SIGKILL)
        self._named.clear()
        return (
            f"{who} didn't come back within a second, as code in C does: all ranks have been "
            "ended, and their names are lost. The next cell makes fresh ranks"
        )

    def _signal(self, pid: int | None, number: int) -> None:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def settle(self, outcomes: dict[int, CellOutcome]) -> str:
        """See to it that the ranks are in step after a cell that went wrong."""
        is_lost = any(outcome.is_out_of_step for outcome in outcomes.values())
        try:
            if not is_lost and all(self._ask(are_in_step)):
                return "The ranks and all their names stay"
            if self.are_threads:
                self._pool.close()
                self._pool = WorkerPool(self._backend, self.size, prefix_output=False)
            else:
                self._ask(renew, self._backend)
        except UnisonoError:
            return self.give_up(range(self.size))
        return (
            "The ranks and all their names stay. A collective was left half-way, so that their "
            "context was made again: make groups and wrapped models (DDP) again"
        )

    def _ask(self, fn: Callable[..., T], *args: object) -> list[T]:
        """Run a function in all ranks, for a while at most."""
        with deadline(_SETTLE_S):
            return self._pool.run(fn, *args)

    def forget(self) -> str:
        """Take note that the ranks have ended."""
        if self.are_threads:
            return "All names stay; the next cell runs in fresh threads"
        self._named.clear()
        return "All ranks have ended, and their names are lost. The next cell makes fresh ranks"

    def stack(self, rank: int, cell: Cell) -> str:
        """Say where a rank is that doesn't come back, even in C."""
        # Local; takes a moment.
        if self.are_threads:
            thread_id = threads_of(self._key).get(rank)
            return "" if thread_id is None else f"at {stack_of(thread_id)}\n"
        pids = self._pool.pids
        self._signal(pids[rank] if pids else None, signal.SIGUSR1)
        until = time.monotonic() + _STACK_S
        path, text, before = cell.stack(rank), "", ""
        while not (text == before and text.endswith("\n")) and time.monotonic() < until:
            time.sleep(_TICK_S)  # a rank writes line by line
            before, text = text, path.read_text()
        return "".join(line for line in text.splitlines(keepends=True) if not _is_of_ours(line))


def _is_of_ours(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and is_ours(frame[1])
