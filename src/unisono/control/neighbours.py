"""Whom one rank can see: the ranks it is connected to, and the processes of its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.control.tree import Links
from unisono.control.wire import Line

__all__ = ("Neighbours",)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Whom a rank can see.

    Args:
        links: who is connected to whom.
        lines: one for each connected place.
        asides: a second one for each.
        pids: process ids, as this process sees them, of the places on this host.
    """

    links: Links
    lines: Mapping[int, Line]
    asides: Mapping[int, Line]
    pids: Mapping[int, int]
