"""Stacks of ranks, requested by a signal, and the user's lines in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from unisono.host import stack_signal
from unisono.tracebacks import is_of_a_library

STOPPED = "is stopped by a signal, so its stack cannot be read"

_PACKAGE = Path(__file__).parents[1]
_N_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of one thread."""

    ident: int
    frames: tuple[Frame, ...]


def parse(text: str) -> tuple[Frame, ...]:
    """Parse a stack that faulthandler has written."""
    return tuple(Frame(*frame) for frame in stack_signal.parse(text))


def own_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the user's frame: the innermost outside unisono and installed libraries."""
    foreign = [frame for frame in _begun(frames) if not _is_ours(frame.file)]
    own = (frame for frame in foreign if not is_of_a_library(frame.file))
    return next(own, foreign[0] if foreign else None)


def folded(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Remove unisono's own frames and their callees, in which the ranks of one call differ."""
    frames, own = _begun(frames), own_frame(frames)
    if own is None or is_of_a_library(own.file):
        return tuple(frames)
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


def of_ranks(
    ranks: Mapping[int, tuple[Mapping[str, Any], bool]],
    timeout_s: float,
    *,
    all_threads: bool = False,
) -> dict[int, list[Stack] | str]:
    """Return the stacks of ranks."""
    with ThreadPoolExecutor(_N_AT_ONCE) as executor:
        asked = {
            rank: executor.submit(_of_rank, *each, timeout_s, all_threads)
            for rank, each in ranks.items()
        }
        return {rank: each.result() for rank, each in asked.items()}


def _of_rank(
    facts: Mapping[str, Any], is_stopped: bool, timeout_s: float, all_threads: bool
) -> list[Stack] | str:
    if is_stopped:
        return STOPPED
    pid = facts["pid"]
    own = facts.get("thread_id", pid)
    if not Path(f"/proc/{pid}/task/{own}").exists():  # it has ended, and others go on
        own = pid
    texts = stack_signal.texts(pid, facts, own, timeout_s, all_threads)
    return silent(timeout_s, facts) if texts is None else told(texts)


def told(texts: Mapping[int, str]) -> list[Stack]:
    """Parse the stacks of threads."""
    return [Stack(thread, parse(text)) for thread, text in texts.items() if text]


def silent(timeout_s: float, facts: Mapping[str, Any]) -> str:
    """Return why a rank has no stack here."""
    if "signal" not in facts:
        return "can't be asked for its stack: that takes Python 3.11 or later, and Linux"
    return f"doesn't answer within {timeout_s:g} s"


def is_before(one: Sequence[Frame], other: Sequence[Frame]) -> bool:
    """Return whether a rank is on an earlier line than another, in the function where they part."""
    # False where they part in different functions. In a loop, lines prove little.
    for mine, theirs in zip(reversed(one), reversed(other), strict=False):
        if (mine.file, mine.function) != (theirs.file, theirs.function):
            return False
        if mine.line != theirs.line:
            return mine.line < theirs.line
    return False


def equal(stacks: Mapping[int, Iterable[Frame]]) -> list[tuple[tuple[int, ...], tuple[Frame, ...]]]:
    """Group ranks by equal stacks, the largest group first."""
    ranks: dict[tuple[Frame, ...], list[int]] = {}
    for rank, frames in sorted(stacks.items()):
        ranks.setdefault(tuple(frames), []).append(rank)
    groups = [(tuple(each), frames) for frames, each in ranks.items()]
    return sorted(groups, key=lambda group: (-len(group[0]), group[0]))
