"""Parser of Slurm's lists of hosts: ``n[1-3,7],login-[01-03]-x``.

    list  := item ("," item)*
    item  := (text | "[" range ("," range)* "]")+
    text  := letters, digits, ".", "_", "-"
    range := number | number "-" number

Leading zeros of a range's first number are kept: ``n[08-10]`` is n08, n09, n10. Documented in
``scontrol(1)`` (``show hostnames``) and ``slurm.conf(5)``.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_TOKEN = re.compile(r"(?P<text>[A-Za-z0-9._-]+)|\[(?P<ranges>[0-9,-]+)\]|(?P<comma>,)")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")
_MOST_HOSTS = 65_536
_LONGEST_NAME = 255


class _Part(NamedTuple):
    """Part of an item: its first text, the number of its texts, the length of the longest."""

    first: str
    size: int
    longest: int


def parse_hostlist(text: str) -> tuple[str, int]:
    """Return the first host of a list and the number of hosts, without expanding the list."""
    # Time and memory are proportional to `text`, not to the size of its ranges.
    items: list[list[_Part]] = [[]]
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError(f"character {position + 1} is not part of a list of hosts")
        position = token.end()
        if token["comma"]:
            items.append([])
        elif token["ranges"]:
            items[-1].append(_parse_ranges(token["ranges"]))
        else:
            items[-1].append(_Part(token["text"], 1, len(token["text"])))
    if not all(items):
        raise ValueError("it names no host before or after a comma")
    count = sum(math.prod(part.size for part in item) for item in items)
    if count > _MOST_HOSTS:
        raise ValueError(f"it names more than {_MOST_HOSTS} hosts")
    if max(sum(part.longest for part in item) for item in items) > _LONGEST_NAME:
        raise ValueError(f"a name in it is longer than {_LONGEST_NAME} characters")
    return "".join(part.first for part in items[0]), count


def _parse_ranges(text: str) -> _Part:
    first, count, longest = "", 0, 0
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"{piece[:40]!r} is not a range of numbers")
        low, high = match["low"], int(match["high"] or match["low"])
        if high < int(low):
            raise ValueError(f"range {piece!r} ends before it begins")
        first, count = first or low, count + high - int(low) + 1
        longest = max(longest, len(low), len(str(high)))
    return _Part(first, count, longest)
