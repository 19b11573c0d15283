"""Stacks of ranks, requested by a signal, and the user's lines in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from unisono.recording import stack_signal
from unisono.topology import ranks_by_value
from unisono.tracebacks import is_of_a_library

STOPPED = "is stopped by a signal, so its stack cannot be read"
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


def read_stacks(
    facts: Mapping[str, Any], timeout_s: float, *, is_stopped: bool, all_threads: bool
) -> list[Stack] | str:
    """Return the stacks of a live rank of this host, its own thread's first; else why not."""
    if is_stopped:
        return STOPPED
    if "signal" not in facts:
        return "can't be asked for its stack: that takes Python 3.11 or later, and Linux"
    pid, own = facts["pid"], own_thread(facts)
    texts = stack_signal.texts(pid, facts, own, timeout_s, all_threads)
    if texts is None:
        return f"doesn't answer within {timeout_s:g} s"
    return [Stack(thread, parse(text)) for thread, text in texts.items()]


def own_thread(facts: Mapping[str, Any]) -> int:
    """Return the id of a rank's own thread, or of the main one if it has ended."""
    pid = int(facts["pid"])
    thread_id = int(facts.get("thread_id", 0))
    return thread_id if Path(f"/proc/{pid}/task/{thread_id}").exists() else pid


def parse(text: str) -> tuple[Frame, ...]:
    """Parse a stack that faulthandler has written."""
    return tuple(Frame(*frame) for frame in stack_signal.parse(text))


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the user's frame: the innermost outside unisono and installed libraries."""
    foreign = [frame for frame in _begun(frames) if not _is_ours(frame.file)]
    own = (frame for frame in foreign if not is_of_a_library(frame.file))
    # If no frame is the user's, a library's is better than none.
    return next(own, foreign[0] if foreign else None)


def folded(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Remove unisono's own frames and their callees, in which the ranks of one call differ."""
    frames, own = _begun(frames), own_frame(frames)
    if own is None or is_of_a_library(own.file):  # no code of the user's: all is shown
        return tuple(frames)
    # The innermost is first: the last of ours before the user's frame is the call, and all frames
    # before that one are its callees. Ours further out have started the user's code.
    ours = [at for at, frame in enumerate(frames[: frames.index(own)]) if _is_ours(frame.file)]
    begin = ours[-1] + 1 if ours else 0
    return tuple(frame for frame in frames[begin:] if not _is_ours(frame.file))


def _begun(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Remove the command line of a process that we started."""
    is_started = len(frames) > 1 and frames[-1].file == "<string>" and _is_ours(frames[-2].file)
    return frames[:-1] if is_started else frames


@cache
def _is_ours(file: str) -> bool:
    """Return whether a file is unisono's, in any environment."""
    _, package, inside = file.rpartition(f"/{_PACKAGE.name}/")
    return bool(package) and (_PACKAGE / inside).is_file()


def is_before(one: Sequence[Frame], other: Sequence[Frame]) -> bool:
    """Return whether a rank is on an earlier line than another, in the function where they part."""
    # False where they part in different functions. In a loop, lines prove little.
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
