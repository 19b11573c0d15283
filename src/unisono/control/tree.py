"""The tree of a group's connections.

A place is a rank's position in its group, from 0 to ``n - 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAN_OUT = 8
"""Number of other hosts' leaders that one leader serves."""


@dataclass(frozen=True, slots=True)
class Links:
    """The places that one rank is connected to."""

    up: int | None
    downs: tuple[int, ...]
    below: dict[int, tuple[int, ...]]


def links(hosts: Sequence[Sequence[int]], place: int, fan_out: int = FAN_OUT) -> Links:
    """Return one rank's links in the tree, given the places on each host."""
    # Local: every rank computes the same tree.
    node = next(node for node, places in enumerate(hosts) if place in places)
    leader, *others = hosts[node]
    if place != leader:
        return Links(leader, (), {})
    up = None if node == 0 else hosts[(node - 1) // fan_out][0]
    below: dict[int, tuple[int, ...]] = {other: (other,) for other in others}
    for child in _children(node, fan_out, len(hosts)):
        below[hosts[child][0]] = tuple(_beneath(child, fan_out, hosts))
    return Links(up, tuple(below), below)


def _children(node: int, fan_out: int, count: int) -> range:
    first = node * fan_out + 1
    return range(min(first, count), min(first + fan_out, count))


def _beneath(node: int, fan_out: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    places: list[int] = []
    layer = [node]
    while layer:
        places += [place for each in layer for place in hosts[each]]
        layer = [child for each in layer for child in _children(each, fan_out, len(hosts))]
    return places
