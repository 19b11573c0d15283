"""What `horovod_calls` and `mpi_calls` share: sums and values, ours against a library's own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from functools import partial

from harness import Figure, Goal, Timing, interleave, parser, report

import unisono

__all__ = ("Calls", "compare", "measure_values")

TEXT = "twenty characters ok"
SMALL = {"a": 1, "b": "x"}
VALUES = ("all_gather of 20 characters", "broadcast of a small dict", "all_reduce of a number")
SMALL_CALLS, LARGE_CALLS = 50, 3
LARGE = 4 * 2**20  # float32: 16 MB
MOST_US = 5.0
MOST_SHARE = 0.03


Calls = Sequence[Callable[[], object]]


def measure_values(rounds: int, library: str, theirs: Calls) -> list[dict[str, Timing]]:
    """Time each of VALUES, ours against a library's. Collective over all ranks."""
    ours: Calls = (
        partial(unisono.all_gather, TEXT),
        partial(unisono.broadcast, SMALL),
        partial(unisono.all_reduce, 0.5),
    )
    return [
        interleave(rounds, {"unisono": mine, library: other}, SMALL_CALLS)
        for mine, other in zip(ours, theirs, strict=True)
    ]


def compare(
    library: str,
    sums: Callable[[int, int, int, int], dict[str, Timing]],
    values: Callable[[int, int], list[dict[str, Timing]]],
    bound: str,
    rounds: int,
) -> int:
    """Measure in two replicas, and print. Values are only shown.

    Args:
        library: the peer's distribution, and the backend.
        sums: times both in a replica, given its local rank, rounds, elements and calls in a turn.
        values: times each of VALUES in a replica, given its local rank and rounds.
        bound: what our call does besides the library's.
        rounds: the default.

    Returns:
        The exit code: 1 where a goal is missed, else 0.
    """
    arguments = parser(f"What calls cost over {library}'s own.", rounds).parse_args()
    figures = []
    for work, elements, calls in (("4 bytes", 1, SMALL_CALLS), ("16 MB", LARGE, LARGE_CALLS)):
        args = (arguments.rounds, elements, calls)
        found = unisono.spawn(library, sums, args, nproc_per_node=2)[0]
        most = MOST_US if elements == 1 else MOST_SHARE * found[library].median
        goal = Goal(most, is_difference=True, bound=bound)
        line = f"all_reduce_({work}), world 2"
        figures.append(Figure(line, found["unisono"], library, found[library], goal))
    found = unisono.spawn(library, values, (arguments.rounds,), nproc_per_node=2)[0]
    for work, timings in zip(VALUES, found, strict=True):
        line = f"{work}, world 2"
        figures.append(Figure(line, timings["unisono"], library, timings[library]))
    versions = {name: importlib.metadata.version(name) for name in ("torch", library)}
    facts = {**versions, "rounds": arguments.rounds}
    return report(library, figures, [bound], facts, how=arguments.how)
