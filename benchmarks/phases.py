"""When the ranks of a job have come through each phase of set-up, from `spawn` to its end.

Each phase ends when the last rank has passed it, so the phases add up to the whole. The ranks are
those of a second `spawn`: the process that they are copied from is there.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import unisono
from unisono.models.native import process_group
from unisono.models.native.rendezvous import Rendezvous

__all__ = ("RANKS", "measure", "report")

RANKS = (8, 16, 32, 64, 128)
PHASES = ("copies", "store", "gloo", "control plane", "function", "end")
"""What each is: processes that have their task, all ranks met in the job's store, gloo's
connections, those of the control plane with its first round, one barrier, until `spawn` returns."""
Row = dict[str, float]


class Stopwatch:
    """The function of a rank, which notes when the rank has passed each phase before it."""

    _passed: dict[str, float]

    def __getstate__(self) -> dict[str, Any]:
        """Give something, so that the worker calls `__setstate__`."""
        return {"is_watching": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin in the worker, which has its task and makes its context next."""
        self._passed = {"copies": time.monotonic()}
        self._note_end(Rendezvous, "store", "store")
        self._note_end(process_group, "join", "gloo")
        self._note_end(process_group, "place_by_hosts", "control plane")

    def _note_end(self, owner: Any, name: str, phase: str) -> None:
        whole: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(whole)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = whole(*args, **kwargs)
            self._passed[phase] = time.monotonic()
            return result

        setattr(owner, name, noted)

    def __call__(self, local_rank: int) -> tuple[dict[str, float], float]:
        """Meet in one barrier; give the times, and the seconds of processor until then."""
        unisono.barrier()
        self._passed["function"] = time.monotonic()
        used = os.times()
        return self._passed, used.user + used.system


def measure(size: int) -> Row:
    """Start `size` ranks; give the seconds of each phase, of the whole, and of the processor."""
    begin = time.monotonic()
    passed = unisono.spawn("gloo", Stopwatch(), nproc_per_node=size)
    ends = {phase: max(times[phase] for times, _ in passed) for phase in PHASES[:-1]}
    ends[PHASES[-1]] = time.monotonic()
    row: Row = {"ranks": size}
    last = begin
    for phase, end in ends.items():
        row[phase], last = end - last, end
    row["whole"] = last - begin
    row["processor"] = sum(seconds for _, seconds in passed)
    return row


def median(size: int, rounds: int) -> Row:
    """Give the row whose whole is the median of some: its phases add up."""
    rows = sorted((measure(size) for _ in range(rounds)), key=lambda row: row["whole"])
    return rows[len(rows) // 2]


def report(sizes: Sequence[int], rounds: int, how: str) -> str:
    """Measure each size; write the rows as JSON, as Markdown or as text."""
    measure(2)  # makes the process that the ranks are copied from
    load = os.getloadavg()[0]
    rows = [median(size, rounds) for size in sizes]
    about = f"seconds; {os.cpu_count()} cores; load before: {load:.1f}"
    if how == "json":
        return json.dumps({"about": about, "rows": rows})
    lines = [list(rows[0]), *([f"{value:.4g}" for value in row.values()] for row in rows)]
    if how == "markdown":
        lines.insert(1, ["---:"] * len(rows[0]))
        return "\n".join([f"| {' | '.join(line)} |" for line in lines]) + f"\n\n{about}"
    return "\n".join(["".join(f"{word:>15}" for word in line) for line in lines]) + f"\n{about}"
