"""Descriptions of ranks that are late or gone."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.arguments import number_in
from unisono.model.handle import BACKGROUND
from unisono.plugins import load
from unisono.topology import named
from unisono.tracebacks import frame_of, is_ours, place_of, where

_WARN_AFTER_S = 30.0
_STOPPED = "stopped"
_STATES = {_STOPPED: "it is stopped by a signal", "zombie": "its process has ended"}
_MAX_NAMED = 8
_FRAMES = 6
_WIDTH = 100  # of a line of source
SIDEBAND = "unisono-sideband"
"""Start of the names of threads that serve sidebands."""
_OWN_THREADS = (SIDEBAND, BACKGROUND)  # the user's code doesn't run in them


def warn_after_s() -> float:
    """Return the seconds after which a wait warns once which ranks it waits for."""
    return number_in("UNISONO_WARN_AFTER_S", _WARN_AFTER_S)


@dataclass(frozen=True, slots=True)
class Absent:
    """A rank that is gone, and the evidence."""

    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A rank that did not arrive."""

    rank: int
    behind: Sequence[int] = ()
    pid: int | None = None
    stack: str = ""
    last: str = ""

    def text(self, call: str = "") -> str:
        """Return a description of the rank, its current line first."""
        head = f"rank {self.rank}"
        if self.behind:
            # The rank doesn't answer, and may itself wait for one of these.
            head += f", or one of {list(self.behind)} behind it,"
        head += f" never reached {call}" if call else " never arrived"
        state = "" if self.pid is None else _STATES.get(_state(self.pid), "")
        line, _, frames = self.stack.partition("\n")
        if state or line:
            head += f": {state or f'it is at {line}'}"
        lines = [head]
        if frames and not state:  # the stack of a stopped process is an old one
            lines.append(frames)
        known = [f"its last collective was {self.last}"] if self.last else []
        if self.pid is not None:
            known.append(f"its process is {self.pid} on this host")
        if known:
            lines.append("  " + "; ".join(known))
        return "\n".join(lines)


def report(call: str, arrived: Mapping[int, str], missing: Sequence[Missing]) -> str:
    """Return a description of the missing ranks, and of the calls that the others wait in."""
    lines = [late.text(call) for late in missing[:_MAX_NAMED]]
    if len(missing) > _MAX_NAMED:
        lines.append(f"nor did ranks {[late.rank for late in missing[_MAX_NAMED:]]}")
    ranks_of: dict[str, list[int]] = {}
    for rank, own_call in sorted(arrived.items()):
        ranks_of.setdefault(own_call, []).append(rank)
    for own_call, ranks in ranks_of.items():
        lines.append(f"  {named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {own_call}")
    return "\n".join(lines)


def _state(pid: int) -> str:
    # Without a free descriptor even psutil's import fails: the report then lacks the state.
    with contextlib.suppress(OSError), contextlib.suppress(load("psutil:Error")):
        return str(load("psutil:Process")(pid).status())
    return ""


def is_stopped(pid: int | None) -> bool:
    """Return whether a process of this host has been stopped by a signal."""
    return pid is not None and _state(pid) == _STOPPED


def stack_of(thread_id: int) -> str:
    """Return a thread's position and stack, without unisono's own frames."""
    by_id = {thread.ident: thread for thread in threading.enumerate()}
    thread, main = by_id.get(thread_id), threading.main_thread()
    if thread is None or thread.name.startswith(_OWN_THREADS):  # the user's thread waits for it
        thread_id = main.ident or thread_id
    stack = traceback.extract_stack(frame_of(thread_id))
    if len(stack) > 1 and stack[0].filename == "<string>" and is_ours(stack[1].filename):
        del stack[0]  # the command line of the process that starts ranks
    innermost, frames = where(stack), [each for each in stack if not is_ours(each.filename)]
    if innermost is None:
        return ""
    source = f" ({innermost.line[:_WIDTH]})" if innermost.line else ""
    lines = [f"{place_of(innermost.filename, innermost.lineno or 0)}{source}"]
    if len(frames) > 1:
        lines += [
            f"    {place_of(each.filename, each.lineno or 0)}, in {each.name}: "
            f"{(each.line or '')[:_WIDTH]}"
            for each in frames[-_FRAMES:]
        ]
    return "\n".join(lines)
