"""Ranks that are late or gone: their descriptions, and the waits that look for them."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from unisono.arguments import number_in
from unisono.deadlines import allowed_s, end_of_block, format_s, host_s
from unisono.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ContextError,
    PeerFailedError,
    UnisonoError,
)
from unisono.model.handle import BACKGROUND
from unisono.plugins import load
from unisono.topology import Group, name_of, named, ranks_by_value
from unisono.tracebacks import frame_of, is_ours, place_of, where as innermost_frame

if TYPE_CHECKING:
    from unisono.control.plane import SocketControlPlane

_log = logging.getLogger(__name__)
_WARN_AFTER_S = 30.0
_STOPPED = "stopped"
_STATES = {_STOPPED: "it is stopped by a signal", "zombie": "its process has ended"}
_MAX_NAMED = 8
_FRAMES = 6
_WIDTH = 100  # characters of a source line
SIDEBAND = "unisono-sideband"
"""Start of the names of threads that serve sidebands."""
_OWN_THREADS = (SIDEBAND, BACKGROUND)  # the user's code doesn't run in them
LOOK_S = 0.3
"""Seconds between two looks of a waiting rank for absent ranks."""
_AGAIN_S = 0.02  # between two looks after the backend has lost a peer


def warn_after_s() -> float:
    """Return the seconds after which a waiting rank logs, once, which ranks it waits for."""
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
    for own_call, ranks in ranks_by_value(dict(sorted(arrived.items()))).items():
        lines.append(f"  {named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {own_call}")
    return "\n".join(lines)


def _state(pid: int) -> str:
    """Return psutil's status of a process; empty if unknown."""
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
    if thread is None or thread.name.startswith(_OWN_THREADS):
        thread_id = main.ident or thread_id  # `thread` has ended, or works for the main thread
    stack = traceback.extract_stack(frame_of(thread_id))
    if len(stack) > 1 and stack[0].filename == "<string>" and is_ours(stack[1].filename):
        del stack[0]  # the command line of the process that starts ranks
    innermost = innermost_frame(stack)
    if innermost is None:
        return ""
    source = f" ({innermost.line[:_WIDTH]})" if innermost.line else ""
    lines = [f"{place_of(innermost.filename, innermost.lineno or 0)}{source}"]
    frames = [each for each in stack if not is_ours(each.filename)]
    if len(frames) > 1:  # a single one is the line above
        lines += [
            f"    {place_of(each.filename, each.lineno or 0)}, in {each.name}: "
            f"{(each.line or '')[:_WIDTH]}"
            for each in frames[-_FRAMES:]
        ]
    return "\n".join(lines)


class Wait:
    """One rank's wait within an operation, whose number in the group is `step`; 0 without one."""

    def __init__(
        self,
        control: SocketControlPlane,
        group: Group | None,
        call: str,
        step: int = 0,
        until: float | None = None,
    ) -> None:
        self._control, self._group, self._call, self._step = control, group, call, step
        self._begun, self._until = time.monotonic(), until
        self._end: float | None = None  # unknown until the first look, before which most waits end
        # Whether the last look found an absent rank, and whether this wait was logged.
        self._has_absent = self._is_warned = False

    def __call__(self, position: int | None = None) -> None:
        """Raise if a rank is gone, the group has failed or the deadline has passed."""
        # `position` is that of the awaited rank, which only waits in shared memory know.
        control, now = self._control, time.monotonic()
        absent = control.gone(self._group, self._step)
        if absent is not None and self._has_absent:
            raise PeerFailedError(f"{control.where(self._call)}: {absent.how}", absent.rank)
        if absent is not None:  # until the next look, as its last message may still arrive
            self._has_absent = True
            return
        hub = control.hubs.get(name_of(self._group))
        if hub is not None:
            hub.peers.raise_failure()
        elif position is not None:  # a wait in memory, whose hub `close` has removed
            raise ContextError("finalize() was called meanwhile, by another thread")
        if self._end is None:
            self._end = self._find_end()
        if now >= self._end:
            waited_s = max(0.0, self._end - self._begun) / host_s(1)  # in seconds of the limits
            where = control.where(self._call)
            text = f"{self._late(position)}\n  {where}: not done after {format_s(waited_s)}"
            if hub is not None:
                hub.peers.give_up(text)  # the others can't go on without this rank
            raise CollectiveTimeoutError(text)
        if not self._is_warned and now >= self._begun + host_s(control.warn_after_s()):
            self._is_warned = True
            late = self._late(position, is_over=False)
            _log.warning("%s is still waiting: %s", control.where(self._call), late)

    def fail(self, table: Mapping[str, type[CollectiveError]], error: Exception) -> NoReturn:
        """Raise our error that stands for an error of the backend."""
        if isinstance(error, UnisonoError):
            raise error
        where, text = self._control.where(self._call), str(error).strip()
        kind = matching_error(table, text)
        if kind is CollectiveTimeoutError:
            raise kind(f"{self._late()}\n  {where}: {text}") from error
        if kind is PeerFailedError:
            absent = self._find_absent()
            how = absent.how if absent.rank >= 0 else f"{absent.how}: {text}"
            raise PeerFailedError(f"{where}: {how}", absent.rank) from error
        raise kind(f"{where} failed: {text}") from error

    def _find_end(self) -> float:
        """Return the first of the deadlines that apply."""
        ends = [end_of_block(), self._until]
        timeout_s = allowed_s(self._control.timeout_s, self._group)
        if timeout_s is not None:
            ends.append(self._begun + host_s(timeout_s))
        return min((end for end in ends if end is not None), default=math.inf)

    def _late(self, position: int | None = None, is_over: bool = True) -> str:
        """Return a description of the late ranks."""
        late = self._control.late(self._group, self._step, is_over) if self._step else ""
        if late or position is None:
            return late or "some rank never arrived"
        rank = self._control.model.topology.members(self._group)[position]
        return f"rank {rank} arrived but did not continue"

    def _find_absent(self) -> Absent:
        """Return the absent rank, as rank -1 if it is unknown."""
        # Other ranks may report the absent one only after their next look; without hubs, never.
        until = time.monotonic() + 3 * LOOK_S if self._control.hubs else 0.0
        while True:
            absent = self._control.gone(self._group, self._step)
            if absent is not None:
                return absent
            hub = self._control.hubs.get(name_of(self._group))
            if hub is not None:
                hub.peers.raise_failure()  # one that `gone` has received
            if time.monotonic() >= until:
                return Absent(-1, "lost a peer")
            time.sleep(_AGAIN_S)


def matching_error(table: Mapping[str, type[CollectiveError]], text: str) -> type[CollectiveError]:
    """Return the error of the first pattern that matches a text; CollectiveError if none does."""
    for pattern, error in table.items():
        if re.search(pattern, text, re.IGNORECASE):
            return error
    return CollectiveError
