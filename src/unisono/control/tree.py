"""The connections of a group.

Ranks are numbered by their positions in the group, from 0 to ``n - 1``. The first rank of each host
is its leader: the host's other ranks connect to it. The leaders of a few hosts connect to each
other, so that a value goes only one way between hosts; those of more connect in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAN_OUT = 8
"""Number of other leaders that one leader is connected to, besides the one above."""


@dataclass(frozen=True, slots=True)
class Links:
    """The positions that one rank is connected to."""

    up: int | None
    """The rank that gathers this one's values; None for leaders that are connected directly."""
    across: tuple[int, ...]
    """Leaders that are connected directly."""
    downs: tuple[int, ...]
    """Ranks whose values this one gathers."""
    behind: dict[int, tuple[int, ...]]
    """By each of `across` and `downs`: that position, then all others that are reached through
    it."""


def links(hosts: Sequence[Sequence[int]], position: int, fan_out: int = FAN_OUT) -> Links:
    """Return one rank's links, given the positions on each host."""
    # Local: every rank computes the same connections.
    node = next(node for node, positions in enumerate(hosts) if position in positions)
    leader, *others = hosts[node]
    if position != leader:
        return Links(leader, (), (), {})
    behind: dict[int, tuple[int, ...]] = {other: (other,) for other in others}
    if len(hosts) <= fan_out + 1:
        direct = {positions[0]: tuple(positions) for positions in hosts if positions[0] != leader}
        return Links(None, tuple(direct), tuple(others), direct | behind)
    # Hosts are numbered as in a heap: a host's number gives its parent and its children.
    up = None if node == 0 else hosts[(node - 1) // fan_out][0]
    for child in _children(node, fan_out, len(hosts)):
        behind[hosts[child][0]] = tuple(_beneath(child, fan_out, hosts))
    return Links(up, (), tuple(behind), behind)


def _children(node: int, fan_out: int, count: int) -> range:
    """Return the numbers of the hosts right below a host."""
    first = node * fan_out + 1
    return range(min(first, count), min(first + fan_out, count))


def _beneath(node: int, fan_out: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    """Return the positions on a host and on all hosts below it, the host's own first."""
    positions: list[int] = []
    layer = [node]
    while layer:
        positions += [position for each in layer for position in hosts[each]]
        layer = [child for each in layer for child in _children(each, fan_out, len(hosts))]
    return positions
