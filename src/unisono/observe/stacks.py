"""Stacks of ranks, requested by a signal, and the user's lines in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from unisono.topology import ranks_by_value
from unisono.tracebacks import is_of_a_library

_PACKAGE = Path(__file__).parents[1]


class Frame(NamedTuple):
    """One call on a stack."""

    file: str
    line: int
    function: str


class Stack(NamedTuple):
    """The stack of one thread, the innermost call first."""

    thread_id: int
    frames: tuple[Frame, ...]


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code; without one, of an installed library."""
    # Stacks begin with the innermost frame.
    foreign = [frame for frame in _without_launch(frames) if not _is_unisonos(frame.file)]
    users = [frame for frame in foreign if not is_of_a_library(frame.file)]
    return next(iter(users or foreign), None)


def folded(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Remove unisono's own frames and their callees, in which the ranks of one call differ."""
    frames = _without_launch(frames)
    user = user_frame(frames)
    if user is None or is_of_a_library(user.file):  # without user code, all frames are shown
        return tuple(frames)
    # Of unisono's frames inside the user's frame, the outermost one is the call, and all before it
    # are its callees. Unisono's frames outside the user's frame have started the user's code.
    inside = frames[: frames.index(user)]
    calls = [at for at, frame in enumerate(inside) if _is_unisonos(frame.file)]
    begin = calls[-1] + 1 if calls else 0
    return tuple(frame for frame in frames[begin:] if not _is_unisonos(frame.file))


def _without_launch(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Remove the outermost frame if it is the ``python -c`` by which unisono starts a process."""
    is_launch = len(frames) > 1 and frames[-1].file == "<string>" and _is_unisonos(frames[-2].file)
    return frames[:-1] if is_launch else frames


@cache
def _is_unisonos(file: str) -> bool:
    """Return whether a file is unisono's, in any environment."""
    _, package, inside = file.rpartition(f"/{_PACKAGE.name}/")
    return bool(package) and (_PACKAGE / inside).is_file()


def is_before(one: Sequence[Frame], other: Sequence[Frame]) -> bool:
    """Return whether a stack is on an earlier line than another, where they first differ."""
    # It is False if they first differ in the function. In a loop, an earlier line proves little.
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return False
        if mine.line != theirs.line:
            return mine.line < theirs.line
    return False


def equal(stacks: Mapping[int, tuple[Frame, ...]]) -> list[tuple[tuple[Frame, ...], list[int]]]:
    """Group ranks by equal stacks, the largest group first."""
    groups = ranks_by_value(dict(sorted(stacks.items())))
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
