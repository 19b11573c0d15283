"""Sideband: out-of-band connections for state queries and failure reports, served by a thread.

It works while the rank's own thread computes, or waits in a collective. Bodies are JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.control.condition import Condition
from unisono.control.connection import (
    ANSWER,
    ASK,
    FAIL,
    LATE,
    LEAVE,
    LOOK,
    SEEN,
    Connection,
    ConnectionClosed,
    read_failure,
)
from unisono.control.inquiry import Inquiries
from unisono.control.missing import Farewell
from unisono.control.tree import Links, Seat
from unisono.model.handle import BACKGROUND
from unisono.tracebacks import frame_of, is_ours, place_of, where

_SEND_S = 1.0
_FORWARD_S = 0.02  # for room in the kernel, before a part of an inquiry is dropped
_DEAF_S = 1.0  # where there is no descriptor for who asks from outside of the job
_FAREWELL_S = 1.0  # for the farewell of a rank that is gone, or the end of its connection
_ASK_S = 0.4  # short: a rank stuck in C never answers, and the caller is past its deadline
_FRAMES = 6
_WIDTH = 100  # of a line of source
_OWN_THREADS = ("unisono-sideband", BACKGROUND)  # the user's code doesn't run in them


@dataclass(frozen=True, slots=True)
class State:
    """Where a rank is."""

    stack: str = ""
    last: str = ""
    seq: int = 0
    waits_for: list[int] | None = None
    step: int = 0


def stack_of(thread_id: int) -> str:
    """Say where one thread of this process is, in frames that aren't ours."""
    by_id = {thread.ident: thread for thread in threading.enumerate()}
    thread, main = by_id.get(thread_id), threading.main_thread()
    if thread is None or thread.name.startswith(_OWN_THREADS):  # the user's thread waits for it
        thread_id = main.ident or thread_id
    stack = traceback.extract_stack(frame_of(thread_id))
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
    """The out-of-band connections of one rank, and the thread that serves them."""

    # Frames, and what a rank does with one:
    #   ASK, ANSWER   name a place: handled there, elsewhere forwarded one hop towards it
    #   LOOK, SEEN    the same, for who asks from outside of the job; dropped where it is busy
    #   FAIL, LATE    flooded: the first one is kept, and sent to all neighbours but its source
    #   LEAVE         a farewell: kept; if it is of this host, sent to neighbours of this host
    # A neighbour, as this rank sees it:
    #   connected --LEAVE--> left in good order
    #   connected --its connection closes--> gone without a word
    # A rank that isn't a neighbour:
    #   connected --LEAVE, forwarded--> left in good order, or gone without a word
    #   connected --the neighbour towards it has left--> cut off: nothing can be known of it
    # The thread: serves, until `close` writes to its pipe; then it closes the connections.

    def __init__(
        self,
        place: int,
        links: Links,
        connections: Mapping[int, Connection],
        same_host: Collection[int],
        state: Callable[[str], State],
        seats: Sequence[Seat] = (),
    ) -> None:
        self._place = place
        self._up = links.up
        self._next_hops = {far: down for down, fars in links.below.items() for far in fars}
        self._connections = dict(connections)
        self._same_host = same_host
        self._state = state
        self._departures: dict[int, Farewell | None] = {}  # None: gone without a word
        self._answers: dict[int, State] = {}
        self._failure: bytes | None = None
        self._late: dict[str, tuple[int, str]] = {}
        self._condition = Condition()
        self._inquiries = Inquiries(place, seats, self._offer)
        self._wake_reader, self._wake_writer = os.pipe()
        self._is_open = True
        threading.Thread(target=self._serve, name=_OWN_THREADS[0], daemon=True).start()

    def next_hop(self, place: int) -> int:
        """Return the neighbour through which a place is reached."""
        return self._next_hops.get(place, -1 if self._up is None else self._up)

    def ask(self, places: Iterable[int], group: str = "") -> dict[int, State]:
        """Ask other ranks where they are; wait 0.4 s at most."""
        asked = [place for place in places if place != self._place]
        with self._condition.lock:
            for place in asked:
                self._answers.pop(place, None)
        for place in asked:
            self._forward(ASK, {"to": place, "of": self._place, "group": group}, place)
        self._condition.wait(lambda: all(place in self._answers for place in asked), _ASK_S)
        with self._condition.lock:
            return {place: self._answers[place] for place in asked if place in self._answers}

    def broadcast_failure(self, failure: bytes, source: int | None = None) -> None:
        """Let all ranks know of a failure, also those whose own thread is in a collective."""
        with self._condition.lock:
            if self._failure is not None:
                return
            self._failure = failure
            self._condition.notify_all()
        self._flood(FAIL, failure, source)

    def failure(self, wait_s: float = 0.0) -> bytes | None:
        """Return the body of the first FAIL frame, None if there was none."""
        self._condition.wait(lambda: self._failure is not None, wait_s)
        return self._failure

    def broadcast_late(self, group: str, step: int, text: str, source: int | None = None) -> None:
        """Let all ranks know which ranks didn't come to an operation of the data plane."""
        with self._condition.lock:
            if self._late.get(group, (0, ""))[0] >= step:
                return
            self._late[group] = (step, text)
            self._condition.notify_all()
        self._flood(LATE, json.dumps({"group": group, "step": step, "text": text}).encode(), source)

    def late(self, group: str, step: int, wait_s: float = 0.0) -> str:
        """Return the report of an operation, empty if no rank has sent one."""
        self._condition.wait(lambda: self._late.get(group, (0, ""))[0] == step, wait_s)
        known_step, text = self._late.get(group, (0, ""))
        return text if known_step == step else ""

    def send_farewell(self, farewell: Farewell) -> None:
        """Tell the neighbours that this rank leaves in good order."""
        body = _encode_farewell(self._place, farewell)
        for place in self._connections:
            self._send(LEAVE, body, place)

    def farewell(self, place: int) -> Farewell | None:
        """Return the farewell of a rank that has left, None if it went without a word."""
        # Local; waits for a farewell on its way, a second at most.
        self._condition.wait(
            lambda: place in self._departures or self._is_cut_off(place), _FAREWELL_S
        )
        return self._departures.get(place)

    def is_cut_off(self, place: int) -> bool:
        """Return whether a rank can't be reached, because the one between has left."""
        with self._condition.lock:
            return place not in self._departures and self._is_cut_off(place)

    def _is_cut_off(self, place: int) -> bool:
        return self.next_hop(place) != place and self.next_hop(place) in self._departures

    def close(self) -> None:
        """End the thread, which closes the connections; harmless the second time."""
        self._inquiries.remove()
        if self._is_open:
            self._is_open = False
            os.write(self._wake_writer, b"!")  # a forked child may hold the pipe's other copy
            os.close(self._wake_writer)

    def disown(self) -> None:
        """Close what a forked child has of its parent's; the thread isn't there."""
        if self._is_open:
            self._is_open = False
            os.close(self._wake_writer)
            os.close(self._wake_reader)
        self._inquiries.close()
        for connection in self._connections.values():
            connection.close()

    def _flood(self, kind: int, body: bytes, source: int | None) -> None:
        for place in self._connections:
            if place != source:
                self._send(kind, body, place)

    def _forward(self, kind: int, message: dict[str, Any], place: int) -> None:
        self._send(kind, json.dumps(message).encode(), self.next_hop(place))

    def _send(self, kind: int, body: bytes, place: int) -> None:
        if place in self._connections:
            with contextlib.suppress(ConnectionClosed, TimeoutError), self._condition.lock:
                self._connections[place].send(kind, 0, body, time.monotonic() + _SEND_S)

    def _offer(self, kind: int, message: Mapping[str, Any], place: int, wait_s: float) -> bool:
        """Send what isn't needed by the job, unless the way to a place has no room for it."""
        hop = self.next_hop(place)
        if hop not in self._connections or not self._connections[hop].is_writable(wait_s):
            return False
        until = time.monotonic() + _SEND_S
        with contextlib.suppress(ConnectionClosed, TimeoutError), self._condition.lock:
            self._connections[hop].offer(kind, 0, json.dumps(message).encode(), until)
            return True
        return False

    def _serve(self) -> None:
        wake, asked = self._wake_reader, self._inquiries.fd
        places = {connection.fd: place for place, connection in self._connections.items()}
        readable = select.poll()
        for fd in (wake, *places, *([] if asked is None else [asked])):
            readable.register(fd, select.POLLIN)
        is_over, deaf_until = False, math.inf
        while not is_over:
            for fd, _ in readable.poll(_left_ms(deaf_until)):
                if fd == wake:
                    is_over = True
                elif fd != asked:
                    self._serve_neighbour(places[fd], readable)
                elif not self._inquiries.accept():
                    readable.unregister(fd)
                    deaf_until = time.monotonic() + _DEAF_S
            if asked is not None and time.monotonic() >= deaf_until:
                readable.register(asked, select.POLLIN)
                deaf_until = math.inf
        os.close(wake)
        self._inquiries.close()
        for connection in self._connections.values():
            connection.close()

    def _serve_neighbour(self, place: int, readable: select.poll) -> None:
        try:
            self._receive(place)
        except ConnectionClosed:
            readable.unregister(self._connections[place].fd)
            self._note_departure(place, None, place)

    def _receive(self, source: int) -> None:
        while (frame := self._connections[source].take()) is not None:
            kind, _, body = frame
            if kind == FAIL:
                read_failure(body)
                self.broadcast_failure(body, source)
            elif kind == LEAVE:
                self._note_departure(*_decode_farewell(body), source)
            else:
                try:
                    self._handle(kind, json.loads(body), source)
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    raise ConnectionClosed("it sent what can't be read on its sideband") from None

    def _note_departure(self, place: int, farewell: Farewell | None, source: int) -> None:
        """Take note of a rank that is gone; tell ranks of its host that aren't connected to it."""
        with self._condition.lock:
            if place in self._departures:
                return
            self._departures[place] = farewell
            self._condition.notify_all()
        if place in self._same_host:
            body = _encode_farewell(place, farewell)
            for other in self._connections:
                if other != source and other in self._same_host:
                    self._send(LEAVE, body, other)

    def _handle(self, kind: int, message: Any, source: int) -> None:
        if kind == LATE:
            self.broadcast_late(
                str(message["group"]), int(message["step"]), str(message["text"]), source
            )
        elif kind in (LOOK, SEEN) and int(message["to"]) == self._place:
            self._inquiries.handle(kind, message)
        elif kind in (LOOK, SEEN):
            self._offer(kind, message, int(message["to"]), _FORWARD_S)
        elif int(message["to"]) != self._place:
            self._forward(kind, message, int(message["to"]))
        elif kind == ASK:
            answer = asdict(self._state(str(message["group"])))
            asker = int(message["of"])
            self._forward(ANSWER, {"to": asker, "of": self._place, "state": answer}, asker)
        elif kind == ANSWER:
            with self._condition.lock:
                self._answers[int(message["of"])] = _decode_state(message["state"])
                self._condition.notify_all()


def _left_ms(until: float) -> float | None:
    return None if until == math.inf else max(until - time.monotonic(), 0.0) * 1000


def _encode_farewell(place: int, farewell: Farewell | None) -> bytes:
    fields = None if farewell is None else asdict(farewell)
    return json.dumps({"place": place, "farewell": fields}).encode()


def _decode_farewell(body: bytes) -> tuple[int, Farewell | None]:
    try:
        message = json.loads(body)
        place, fields = int(message["place"]), message["farewell"]
        if fields is None:
            return place, None
        steps = {str(group): int(count) for group, count in fields["steps"].items()}
        return place, Farewell(str(fields["how"]), steps)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ConnectionClosed("it sent a farewell that can't be read") from None


def _decode_state(fields: Any) -> State:
    waits_for = fields["waits_for"]
    places = None if waits_for is None else [int(place) for place in waits_for]
    return State(
        str(fields["stack"]), str(fields["last"]), int(fields["seq"]), places, int(fields["step"])
    )
