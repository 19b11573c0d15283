"""Whom one rank can see: the ranks it is connected to, and the processes of its host."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from unisono.control.connection import Connection

__all__ = ("FAN_OUT", "Links", "Peers", "links")

FAN_OUT = 8
"""How many leaders of other hosts one leader serves, unless the user sets another number."""


@dataclass(frozen=True, slots=True)
class Links:
    """What one rank is connected to, in places 0 to ``n - 1`` of its group.

    Args:
        up: whom it gives to; None at the root.
        downs: who gives to it.
        below: for each of `downs`, every place that is reached through it, itself first.
    """

    up: int | None
    downs: tuple[int, ...]
    below: dict[int, tuple[int, ...]]


def links(hosts: Sequence[Hashable], place: int, fan_out: int = FAN_OUT) -> Links:
    """Lay out the tree and give one rank's part of it.

    Local: every rank computes the same tree.

    Args:
        hosts: for each place of the group, where it is; those of equal value share a host.
        place: whose part is wanted.
        fan_out: leaders below one leader, at least 1.

    Returns:
        Its connections. The first rank of a host leads it; the first host has the root.
    """
    members: dict[Hashable, list[int]] = {}
    for other, host in enumerate(hosts):
        members.setdefault(host, []).append(other)
    teams = list(members.values())
    if place != members[hosts[place]][0]:
        return Links(members[hosts[place]][0], (), {})
    node = list(members).index(hosts[place])
    up = None if node == 0 else teams[(node - 1) // fan_out][0]
    below: dict[int, tuple[int, ...]] = {other: (other,) for other in teams[node][1:]}
    for child in _children(node, fan_out, len(teams)):
        below[teams[child][0]] = tuple(_beneath(child, fan_out, teams))
    return Links(up, tuple(below), below)


def _children(node: int, fan_out: int, count: int) -> range:
    first = node * fan_out + 1
    return range(min(first, count), min(first + fan_out, count))


def _beneath(node: int, fan_out: int, teams: Sequence[Sequence[int]]) -> list[int]:
    found: list[int] = []
    layer = [node]
    while layer:
        found += [place for each in layer for place in teams[each]]
        layer = [child for each in layer for child in _children(each, fan_out, len(teams))]
    return found


@dataclass(frozen=True, slots=True)
class Peers:
    """Whom a rank can see.

    Args:
        links: who is connected to whom.
        lines: one for each connected place.
        asides: a second one for each.
        pids: process ids, as this process sees them, of the places on this host.
    """

    links: Links
    lines: Mapping[int, Connection]
    asides: Mapping[int, Connection]
    pids: Mapping[int, int]
