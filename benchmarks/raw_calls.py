"""What `horovod_calls` and `mpi_calls` share: one sum in place, ours against a library's own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from harness import Figure, Goal, Timing, parser, report

import unisono

__all__ = ("compare",)

SMALL_CALLS, LARGE_CALLS = 50, 3
LARGE = 4 * 2**20  # float32: 16 MB
MOST_US = 5.0
MOST_SHARE = 0.03


def compare(
    library: str,
    sums: Callable[[int, int, int, int], dict[str, Timing]],
    bound: str,
    rounds: int,
) -> int:
    """Measure in two replicas, and print.

    Args:
        library: the peer's distribution, and the backend.
        sums: times both in a replica, given its local rank, rounds, elements and calls in a turn.
        bound: what our call does besides the library's.
        rounds: the default.

    Returns:
        The exit code: 1 where a goal is missed, else 0.
    """
    arguments = parser(f"What an all_reduce_ costs over {library}'s own.", rounds).parse_args()
    figures = []
    for work, elements, calls in (("4 bytes", 1, SMALL_CALLS), ("16 MB", LARGE, LARGE_CALLS)):
        args = (arguments.rounds, elements, calls)
        found = unisono.spawn(library, sums, args, nproc_per_node=2)[0]
        most = MOST_US if elements == 1 else MOST_SHARE * found[library].median
        goal = Goal(most, is_difference=True, bound=bound)
        line = f"all_reduce_({work}), world 2"
        figures.append(Figure(line, found["unisono"], library, found[library], goal))
    versions = {name: importlib.metadata.version(name) for name in ("torch", library)}
    facts = {**versions, "rounds": arguments.rounds}
    return report(library, figures, [bound], facts, as_json=arguments.json)
