"""What status pages and traces cost a collective, beside the same collective without them.

One context, whose calls are recorded in a page, in none, and in a page with a trace to a folder of
memory, in turns. World size 1 is measured in this process, world size 2 in replicas that unisono
spawns, where rank 0 reports. To write the trace's files is part of its time.

    python benchmarks/recording.py [--rounds 31] [--json | --markdown]
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial

import torch
from harness import Figure, Goal, Timing, interleave, parser, report

import unisono
from unisono import context
from unisono.recording.records import CallLog

CALLS = 3000  # in one turn, beside which it counts little to begin and end a trace
WITHOUT, PAGE, TRACE = "neither", "status page", "status page and trace"
PAGES = Goal(
    1.0,
    is_difference=True,
    bound="It asks two clocks and the frame of the caller, and packs a record into memory.",
)
TRACING = Goal(
    3.0,
    is_difference=True,
    bound="It makes a record before the call and one after; a thread writes a line for each, which "
    "holds the interpreter's lock meanwhile.",
)


def turn(log: CallLog) -> None:
    """Make the calls of one turn. Collective over all ranks."""
    context.current().calls = log
    tensor = torch.zeros(1)
    for _ in range(CALLS):
        unisono.all_reduce_(tensor)


def traced(log: CallLog) -> None:
    """Make them within a trace. Collective over all ranks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, unisono.trace(folder):
        turn(log)


def measure(local_rank: int, rounds: int) -> dict[str, Timing]:
    """Time all three, in microseconds a call. Collective over all ranks."""
    with_page = context.current().calls
    without = CallLog(unisono.get_rank(), unisono.get_world_size(), "", None)
    turns = {
        PAGE: partial(turn, with_page),
        WITHOUT: partial(turn, without),
        TRACE: partial(traced, with_page),
    }
    timings = interleave(rounds, turns, 1)
    context.current().calls = with_page
    return {
        name: Timing(tuple(each / CALLS for each in timing.rounds))
        for name, timing in timings.items()
    }


def main() -> int:
    """Measure and print."""
    arguments = parser("What pages and traces cost a collective.", 31).parse_args()
    rounds = arguments.rounds
    unisono.initialize("gloo")
    try:
        alone = measure(0, rounds)
    finally:
        unisono.finalize()
    pair = unisono.spawn("gloo", measure, (rounds,), nproc_per_node=2)[0]
    figures = []
    for size, timings in enumerate((alone, pair), 1):
        for name, peer, goal in ((PAGE, WITHOUT, PAGES), (TRACE, PAGE, TRACING)):
            work = f"all_reduce_(4 bytes), {name}, world {size}"
            judged = goal if size == 1 else None  # two ranks on two cores hide what it costs
            figures.append(Figure(work, timings[name], peer, timings[peer], judged))
    about = {"torch": torch.__version__, "rounds": rounds, "calls": CALLS}
    return report("Recording", figures, (), about, how=arguments.how)


if __name__ == "__main__":
    sys.exit(main())
