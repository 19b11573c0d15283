"""The tree of a group's connections.

Ranks are numbered by their positions in the group, from 0 to ``n - 1``. The first rank of each host
is its leader: the host's other ranks connect to it, and leaders connect to each other in a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAN_OUT = 8
"""Number of other hosts' leaders that one leader serves."""


@dataclass(frozen=True, slots=True)
class Links:
    """The positions that one rank is connected to."""

    up: int | None
    downs: tuple[int, ...]
    below: dict[int, tuple[int, ...]]
    """By each of `downs`: that position first, then all others that are reached through it."""


def links(hosts: Sequence[Sequence[int]], position: int, fan_out: int = FAN_OUT) -> Links:
    """Return one rank's links in the tree, given the positions on each host."""
    # Local: every rank computes the same tree.
    node = next(node for node, positions in enumerate(hosts) if position in positions)
    leader, *others = hosts[node]
    if position != leader:
        return Links(leader, (), {})
    # Hosts are numbered as in a heap: a host's number gives its parent and its children.
    up = None if node == 0 else hosts[(node - 1) // fan_out][0]
    below: dict[int, tuple[int, ...]] = {other: (other,) for other in others}
    for child in _children(node, fan_out, len(hosts)):
        below[hosts[child][0]] = tuple(_beneath(child, fan_out, hosts))
    return Links(up, tuple(below), below)


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
