"""How many Python functions a warm collective calls, how many of them are ours, in how many files.

Counted by ``sys.setprofile`` in the thread that calls, on one of two ranks over gloo. No time is
measured: the same code makes the same calls, but for waiting. A rank looks again until its peer has
come, and wakes one that sleeps, which is 2 calls of ours more. So the collectives take turns, each
is counted often, and its fewest calls are shown: those where nobody waited.

Only public names of unisono are used: with PYTHONPATH it counts another checkout's calls as well.

    python benchmarks/calls.py [--rank 0] [--rounds 40] [--json | --markdown]
    python benchmarks/calls.py --list NAME
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from harness import parser, show, show_json, warm_up

import unisono as idist

WARM_CALLS = 20
COUNTED_CALLS = 25  # in each round
OURS = os.path.dirname(idist.__file__) + os.sep
STACK = "sys._getframe"
HEAD = ("name", "call", "calls of ours", "files of ours", "python calls", STACK)
WALKS: dict[str, tuple[str, Callable[[], Callable[[], object]]]] = {
    "gather-text": ('all_gather("hello")', lambda: partial(idist.all_gather, "hello")),
    "sum-small": (
        "all_reduce(torch.ones(4))",
        lambda: partial(idist.all_reduce, torch.ones(4)),
    ),
    "sum-large": (
        "all_reduce(torch.ones(1 << 20))",
        lambda: partial(idist.all_reduce, torch.ones(1 << 20)),
    ),
    "sum-number": ("all_reduce(3)", lambda: partial(idist.all_reduce, 3)),
    "barrier": ("barrier()", lambda: idist.barrier),
    "broadcast-text": ('broadcast("hello")', lambda: partial(idist.broadcast, "hello")),
}
"""By name: the call as one writes it, and what makes it, without a Python function around it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call within a collective.

    Args:
        depth: 0 for the collective itself.
        file: relative to the folder that it was imported from; empty for `sys._getframe`.
        function: its name, with its class where Python says it.
        is_ours: whether the file is unisono's.
    """

    depth: int
    file: str
    function: str
    is_ours: bool

    @property
    def text(self) -> str:
        """The line of ``--list``."""
        where = f"{self.file}:{self.function}" if self.file else self.function
        return "  " * self.depth + where


@dataclass(frozen=True, slots=True)
class Walk:
    """What one collective passed through.

    Args:
        name: a key of `WALKS`.
        steps: its calls in order: Python's functions, and each time that the stack was asked for.
    """

    name: str
    steps: tuple[Step, ...]

    @property
    def ours(self) -> int:
        """Calls of unisono's functions."""
        return sum(step.is_ours for step in self.steps)

    @property
    def files(self) -> int:
        """Files of unisono that have them."""
        return len({step.file for step in self.steps if step.is_ours})

    @property
    def python(self) -> int:
        """Calls of Python functions, unisono's among them."""
        return sum(bool(step.file) for step in self.steps)

    @property
    def stack(self) -> int:
        """Calls of `sys._getframe`: how often somebody looks for the line of the call."""
        return len(self.steps) - self.python

    def as_dict(self) -> dict[str, Any]:
        """Give what ``--json`` prints of it."""
        counts = (self.ours, self.files, self.python, self.stack)
        return dict(zip(HEAD, (self.name, WALKS[self.name][0], *counts), strict=True))


def record(call: Callable[[], object], counts: bool) -> list[tuple[int, CodeType | None]]:
    """Call; give depth and code of all that it called, None for `sys._getframe`.

    Collective over all ranks, from this one line: calls from different lines are compared further.

    Args:
        call: what is called, without arguments.
        counts: whether this rank counts; else it only calls.
    """
    seen: list[tuple[int, CodeType | None]] = []
    depth = 0
    stack = sys._getframe

    def note(frame: FrameType, event: str, what: object) -> None:
        nonlocal depth
        if event == "call":
            seen.append((depth, frame.f_code))
            depth += 1
        elif event == "return":
            depth -= 1
        elif event == "c_call" and what is stack:
            seen.append((depth, None))

    sys.setprofile(note if counts else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def step(depth: int, code: CodeType | None) -> Step:
    """Name what was called."""
    if code is None:
        return Step(depth, "", STACK, False)
    path = code.co_filename
    folders = [folder for folder in sys.path if folder and path.startswith(folder + os.sep)]
    file = os.path.relpath(path, max(folders, key=len)) if folders else path
    function = getattr(code, "co_qualname", code.co_name)  # Python 3.11 and later have the class
    return Step(depth, file, function, path.startswith(OURS))


def measure(local_rank: int, rank: int, rounds: int, names: tuple[str, ...]) -> list[Walk]:
    """Count, for `rank`; give the fewest calls of all rounds. Collective over all ranks."""
    gc.disable()  # what it finalizes would be counted
    # Counting is slow, and a rank that waits long falls asleep and has to be woken. So rank 1 also
    # counts where rank 0 is asked for; rank 0 stays fast where rank 1 is.
    counts = idist.get_rank() >= rank
    calls = {name: WALKS[name][1]() for name in names}
    fewest: dict[str, list[tuple[int, CodeType | None]]] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            warm_up({name: call}, WARM_CALLS)
            seen = [record(call, counts) for _ in range(COUNTED_CALLS)]
            fewest[name] = min(fewest.get(name, seen[0]), *seen, key=len)
    return [Walk(name, tuple(step(*one) for one in seen)) for name, seen in fewest.items()]


def main() -> int:
    """Count and print."""
    made = parser("How many functions a collective calls, and in how many files.", 40)
    made.add_argument("--rank", type=int, choices=(0, 1), default=0, help="default: %(default)s")
    made.add_argument("--list", choices=tuple(WALKS), help="print every call of one collective")
    arguments = made.parse_args()
    names = (arguments.list,) if arguments.list else tuple(WALKS)
    args = (arguments.rank, arguments.rounds, names)
    walks = idist.spawn("gloo", measure, args, nproc_per_node=2)[arguments.rank]
    about = {"torch": torch.__version__, "rank": f"{arguments.rank} of 2"}
    about["rounds"] = arguments.rounds
    entries = [walk.as_dict() for walk in walks]
    if arguments.list:
        print("\n".join(step.text for step in walks[0].steps))
    elif arguments.how == "json":
        show_json("Calls", entries, about)
    else:
        rows = [[str(cell) for cell in entry.values()] for entry in entries]
        show("Calls", HEAD, rows, (), about, how=arguments.how)
    return 0


if __name__ == "__main__":
    sys.exit(main())
