"""A second line to each neighbour, served by a thread: where is a rank, and who has failed?

Questions and answers name the place that is meant and are handed on towards it, so any rank can ask
any other, also where its leader's own thread is elsewhere. Bodies are JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unisono.control.connection import (
    ANSWER,
    ASK,
    FAIL,
    LATE,
    LEAVE,
    Connection,
    ConnectionClosed,
    read_failure,
)
from unisono.control.missing import Farewell
from unisono.control.monitor import Monitor
from unisono.control.tree import Links
from unisono.model.handle import BACKGROUND
from unisono.tracebacks import is_ours, place_of, where

__all__ = ("Sideband", "State", "stack_of")

_SEND_S = 1.0
_HEAR_S = 1.0  # for what a rank that is gone has said, or for its line's end
_ASK_S = 0.4  # who is stuck in C never answers, and who asks has waited for its deadline already
_FRAMES = 6
_WIDTH = 100  # of a line of source
_OURS = ("unisono-aside", BACKGROUND)  # threads in which the user calls nothing


@dataclass(frozen=True, slots=True)
class State:
    """Where a rank is.

    Args:
        stack: where its thread is, as `stack_of` says it.
        last: the collective that it began last, and the line of it; empty if there is none.
        seq: the number of the last round that it began.
        waits_for: places that it waits for in that round; None where it isn't in the round now.
        step: how many operations of the data plane it has begun in the group that was asked about.
    """

    stack: str = ""
    last: str = ""
    seq: int = 0
    waits_for: list[int] | None = None
    step: int = 0


def stack_of(thread_id: int) -> str:
    """Say where one thread of this process is, in frames that aren't ours.

    Local.

    Returns:
        The user's line, as in ``train.py:31 (time.sleep(60))``; then, where there are several, a
        line for each of the innermost frames. Empty where there is none.
    """
    by_id = {thread.ident: thread for thread in threading.enumerate()}
    thread, main = by_id.get(thread_id), threading.main_thread()
    if thread is None or thread.name.startswith(_OURS):  # the user's waits for it
        thread_id = main.ident or thread_id
    stack = traceback.extract_stack(sys._current_frames().get(thread_id))
    if len(stack) > 1 and stack[0].filename == "<string>" and is_ours(stack[1].filename):
        del stack[0]  # the command line of the process that makes ranks
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


class Sideband:
    """The side lines of one rank, and the thread that answers on them.

    Args:
        place: this rank's place.
        links: who is connected to whom.
        lines: one line for each neighbour, by its place.
        near: places of this host, which see each other's end.
        state: tells where this rank is, given the name of the group that is asked about; called in
            the thread of the side lines.
    """

    def __init__(
        self,
        place: int,
        links: Links,
        lines: Mapping[int, Connection],
        near: Collection[int],
        state: Callable[[str], State],
    ) -> None:
        self._place = place
        self._up = links.up
        self._towards = {far: near for near, fars in links.below.items() for far in fars}
        self._lines = dict(lines)
        self._near = near
        self._state = state
        self._left: dict[int, Farewell | None] = {}  # None for a line that ended without a word
        self._answers: dict[int, State] = {}
        self._failure: bytes | None = None
        self._late: dict[str, tuple[int, str]] = {}
        self._heard = Monitor()
        self._wake, self._end = os.pipe()
        self._is_open = True
        threading.Thread(target=self._serve, name=_OURS[0], daemon=True).start()

    def towards(self, place: int) -> int:
        """Give the neighbour through which a place is reached. Local."""
        return self._towards.get(place, -1 if self._up is None else self._up)

    def ask(self, places: Iterable[int], group: str = "") -> dict[int, State]:
        """Ask other ranks where they are; wait 0.4 s at most.

        Local.

        Args:
            places: whom to ask.
            group: the name of the group that the question is about.

        Returns:
            The answers that came, by place.
        """
        asked = [place for place in places if place != self._place]
        with self._heard.lock:
            for place in asked:
                self._answers.pop(place, None)
        for place in asked:
            self._pass_on(ASK, {"to": place, "of": self._place, "group": group}, place)
        self._heard.wait(lambda: all(place in self._answers for place in asked), _ASK_S)
        with self._heard.lock:
            return {place: self._answers[place] for place in asked if place in self._answers}

    def tell(self, failure: bytes, source: int | None = None) -> None:
        """Let all ranks know of a failure, also those whose own thread is in a collective.

        Local.

        Args:
            failure: what to say; only the first one counts.
            source: the place that said so, None for this rank itself.
        """
        with self._heard.lock:
            if self._failure is not None:
                return
            self._failure = failure
            self._heard.notify_all()
        self._flood(FAIL, failure, source)

    def failure(self, wait_s: float = 0.0) -> bytes | None:
        """Give what the first rank that failed was told to say, None if nobody has. Local."""
        self._heard.wait(lambda: self._failure is not None, wait_s)
        return self._failure

    def tell_late(self, group: str, step: int, text: str, source: int | None = None) -> None:
        """Let all ranks know who didn't come to an operation of the data plane.

        Local.

        Args:
            group: its name.
            step: the number of the operation; only what is first said of it counts.
            text: who it is.
            source: as in `tell`.
        """
        with self._heard.lock:
            if self._late.get(group, (0, ""))[0] >= step:
                return
            self._late[group] = (step, text)
            self._heard.notify_all()
        self._flood(LATE, json.dumps({"group": group, "step": step, "text": text}).encode(), source)

    def late(self, group: str, step: int, wait_s: float = 0.0) -> str:
        """Give what some rank has said of an operation, empty if none has. Local."""
        self._heard.wait(lambda: self._late.get(group, (0, ""))[0] == step, wait_s)
        found, text = self._late.get(group, (0, ""))
        return text if found == step else ""

    def tell_leave(self, farewell: Farewell) -> None:
        """Say that this rank leaves in good order. Local."""
        body = _farewell_of(self._place, farewell)
        for place in self._lines:
            self._send(LEAVE, body, place)

    def farewell(self, place: int) -> Farewell | None:
        """Give what a rank said before it left, None if it went without a word.

        Local; waits for what is on its way, a second at most.
        """
        self._heard.wait(lambda: place in self._left or self._is_cut_off(place), _HEAR_S)
        return self._left.get(place)

    def is_cut_off(self, place: int) -> bool:
        """Tell whether nothing can be heard of a rank, for the one between has left. Local."""
        with self._heard.lock:
            return place not in self._left and self._is_cut_off(place)

    def _is_cut_off(self, place: int) -> bool:
        return self.towards(place) != place and self.towards(place) in self._left

    def close(self) -> None:
        """End the thread, which closes the lines. Local; harmless the second time."""
        if self._is_open:
            self._is_open = False
            os.write(self._end, b"!")  # a forked child may hold the pipe's other copy
            os.close(self._end)

    def disown(self) -> None:
        """Close what a forked child has of its parent's, where this thread isn't. Local."""
        if self._is_open:
            self._is_open = False
            os.close(self._end)
            os.close(self._wake)
        for line in self._lines.values():
            line.close()

    def _flood(self, kind: int, body: bytes, source: int | None) -> None:
        for place in self._lines:
            if place != source:
                self._send(kind, body, place)

    def _pass_on(self, kind: int, said: dict[str, Any], place: int) -> None:
        self._send(kind, json.dumps(said).encode(), self.towards(place))

    def _send(self, kind: int, body: bytes, place: int) -> None:
        if place in self._lines:
            with contextlib.suppress(ConnectionClosed, TimeoutError), self._heard.lock:
                self._lines[place].send(kind, 0, body, time.monotonic() + _SEND_S)

    def _serve(self) -> None:
        wake = self._wake
        places = {line.fd: place for place, line in self._lines.items()}
        readable = select.poll()
        for fd in (wake, *places):
            readable.register(fd, select.POLLIN)
        is_over = False
        while not is_over:
            for fd, _ in readable.poll():
                if fd == wake:
                    is_over = True
                    continue
                try:
                    self._hear(places[fd])
                except ConnectionClosed:
                    readable.unregister(fd)
                    self._note_leave(places[fd], None, places[fd])
        os.close(wake)
        for line in self._lines.values():
            line.close()

    def _hear(self, source: int) -> None:
        while (frame := self._lines[source].take()) is not None:
            kind, _, body = frame
            if kind == FAIL:
                read_failure(body)
                self.tell(body, source)
            elif kind == LEAVE:
                self._note_leave(*_read_farewell(body), source)
            else:
                try:
                    self._read(kind, json.loads(body), source)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    raise ConnectionClosed("it sent what can't be read on its side line") from None

    def _note_leave(self, place: int, farewell: Farewell | None, source: int) -> None:
        """Take note of a rank that is gone; tell those of its host that aren't connected to it."""
        with self._heard.lock:
            if place in self._left:
                return
            self._left[place] = farewell
            self._heard.notify_all()
        if place in self._near:
            body = _farewell_of(place, farewell)
            for other in self._lines:
                if other != source and other in self._near:
                    self._send(LEAVE, body, other)

    def _read(self, kind: int, said: Any, source: int) -> None:
        if kind == LATE:
            self.tell_late(str(said["group"]), int(said["step"]), str(said["text"]), source)
        elif int(said["to"]) != self._place:
            self._pass_on(kind, said, int(said["to"]))
        elif kind == ASK:
            answer = asdict(self._state(str(said["group"])))
            asker = int(said["of"])
            self._pass_on(ANSWER, {"to": asker, "of": self._place, "state": answer}, asker)
        elif kind == ANSWER:
            with self._heard.lock:
                self._answers[int(said["of"])] = _read_state(said["state"])
                self._heard.notify_all()


def _farewell_of(place: int, farewell: Farewell | None) -> bytes:
    said = None if farewell is None else asdict(farewell)
    return json.dumps({"place": place, "said": said}).encode()


def _read_farewell(body: bytes) -> tuple[int, Farewell | None]:
    try:
        read = json.loads(body)
        place, said = int(read["place"]), read["said"]
        if said is None:
            return place, None
        steps = {str(group): int(count) for group, count in said["steps"].items()}
        return place, Farewell(str(said["how"]), steps)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ConnectionClosed("it sent a farewell that can't be read") from None


def _read_state(said: Any) -> State:
    waits_for = said["waits_for"]
    places = None if waits_for is None else [int(place) for place in waits_for]
    return State(str(said["stack"]), str(said["last"]), int(said["seq"]), places, int(said["step"]))
