"""The tree of a group's connections.

A place is a rank's position in its group, from 0 to ``n - 1``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

FAN_OUT = 8
"""Number of other hosts' leaders that one leader serves."""


@dataclass(frozen=True, slots=True)
class Links:
    """The places that one rank is connected to."""

    up: int | None
    downs: tuple[int, ...]
    below: dict[int, tuple[int, ...]]


def links(hosts: Sequence[Hashable], place: int, fan_out: int = FAN_OUT) -> Links:
    """Return one rank's links in the tree."""
    # Local: every rank computes the same tree.
    members = _members(hosts)
    leader = members[hosts[place]][0]
    if place != leader:
        return Links(leader, (), {})
    teams = list(members.values())
    node = list(members).index(hosts[place])
    up = None if node == 0 else teams[(node - 1) // fan_out][0]
    below: dict[int, tuple[int, ...]] = {other: (other,) for other in teams[node][1:]}
    for child in _children(node, fan_out, len(teams)):
        below[teams[child][0]] = tuple(_beneath(child, fan_out, teams))
    return Links(up, tuple(below), below)


def _members(hosts: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    members: dict[Hashable, list[int]] = {}
    for place, host in enumerate(hosts):
        members.setdefault(host, []).append(place)
    return members


def _children(node: int, fan_out: int, count: int) -> range:
    first = node * fan_out + 1
    return range(min(first, count), min(first + fan_out, count))


def _beneath(node: int, fan_out: int, teams: Sequence[Sequence[int]]) -> list[int]:
    places: list[int] = []
    layer = [node]
    while layer:
        places += [place for each in layer for place in teams[each]]
        layer = [child for each in layer for child in _children(each, fan_out, len(teams))]
    return places
