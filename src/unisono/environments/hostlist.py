"""Slurm's grammar for lists of hosts: ``n[1-3,7],login-[01-03]-x``.

    list  := item ("," item)*
    item  := (text | "[" range ("," range)* "]")+
    text  := letters, digits, ".", "_", "-"
    range := number | number "-" number

The zeros in front of a range's first number are kept: ``n[08-10]`` is n08, n09, n10. Where an
item has several brackets, the last one counts fastest. Documented in ``scontrol(1)``
(``show hostnames``) and ``slurm.conf(5)``.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TypeAlias

_TOKEN = re.compile(r"(?P<text>[A-Za-z0-9._-]+)|\[(?P<ranges>[0-9,-]+)\]|(?P<comma>,)")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")
_MOST_HOSTS = 65_536
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class _Range:
    low: int
    high: int
    width: int

    @property
    def size(self) -> int:
        return self.high - self.low + 1

    @property
    def longest(self) -> int:
        return max(self.width, len(str(self.high)))

    def names(self) -> list[str]:
        return [f"{number:0{self.width}d}" for number in range(self.low, self.high + 1)]


_Part: TypeAlias = "str | tuple[_Range, ...]"


@dataclass(frozen=True, slots=True)
class Hostlist:
    """A list of hosts that was read but not expanded."""

    items: tuple[tuple[_Part, ...], ...]

    def first(self) -> str:
        """Name the first host."""
        return "".join(
            part if isinstance(part, str) else f"{part[0].low:0{part[0].width}d}"
            for part in self.items[0]
        )

    def count(self) -> int:
        """Count the hosts without expanding the list."""
        return sum(map(_size_of, self.items))

    def expand(self) -> tuple[str, ...]:
        """Name every host, in order."""
        return tuple(
            "".join(names)
            for item in self.items
            for names in itertools.product(*map(_names_of, item))
        )


def parse_hostlist(text: str) -> Hostlist:
    """Read a list of hosts in Slurm's grammar."""
    # Takes time and memory in proportion to `text`, whatever its ranges say.
    items: list[list[_Part]] = [[]]
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError(f"character {position + 1} is not part of a list of hosts")
        position = token.end()
        if token["comma"]:
            items.append([])
        else:
            items[-1].append(token["text"] or _ranges(token["ranges"]))
    if not all(items):
        raise ValueError("it names no host before or after a comma")
    hosts = Hostlist(tuple(map(tuple, items)))
    if hosts.count() > _MOST_HOSTS:
        raise ValueError(f"it names more than {_MOST_HOSTS} hosts")
    if max(map(_length_of, hosts.items)) > _LONGEST_NAME:
        raise ValueError(f"a name in it is longer than {_LONGEST_NAME} characters")
    return hosts


def _ranges(text: str) -> tuple[_Range, ...]:
    ranges = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece[:40]!r} is not a range of numbers")
        low, high = match["low"], match["high"] or match["low"]
        if int(high) < int(low):
            raise ValueError(f"range {piece!r} ends before it begins")
        ranges.append(_Range(int(low), int(high), len(low)))
    return tuple(ranges)


def _size_of(item: tuple[_Part, ...]) -> int:
    return math.prod(
        sum(piece.size for piece in part) for part in item if not isinstance(part, str)
    )


def _length_of(item: tuple[_Part, ...]) -> int:
    return sum(
        len(part) if isinstance(part, str) else max(piece.longest for piece in part)
        for part in item
    )


def _names_of(part: _Part) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [name for piece in part for name in piece.names()]
