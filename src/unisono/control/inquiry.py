"""Inquiries: who isn't of the job asks one rank of this host what ranks of other hosts are in.

    asker ──a line of JSON──▶ a rank of its host ──LOOK, along the tree──▶ a rank of each other host
    asker ◀──lines of JSON─── that rank ◀──SEEN, one for each page─── reads the pages of its host

The asker comes to a status socket, which this user alone can open. Threads that live as long as an
inquiry do all this: neither the rank's own thread nor the sideband's waits for it. A rank that is
asked reads nothing of what it passes on.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unisono.control.addresses import peer
from unisono.control.condition import Condition
from unisono.control.connection import LOOK, SEEN
from unisono.control.tree import Seat
from unisono.host import stack_signal
from unisono.host.page_copies import PageCopy, copied, packed, to_plain
from unisono.host.status_page import pages
from unisono.host.status_socket import StatusSocket

_MOST = 4  # inquiries, and answers, at a time
_REQUEST_S = 1.0  # for the asker to say what it wants, and to read the answer
_REQUEST_BYTES = 1 << 16
_LONGEST_S = 30.0
_SEND_S = 0.5  # for room, for each part of an answer
_LOOK_S = 0.02  # the same for a question
_N_AT_ONCE = 16
_NAME = "unisono-sideband-inquiry"
# What is asked can't be read (RecursionError is a RuntimeError), or this process ends.
_CANNOT = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError)


@dataclass(slots=True)
class _Inquiry:
    """What has come to one inquiry."""

    asked_ns: dict[int, int] = field(default_factory=dict)
    came_ns: dict[int, int] = field(default_factory=dict)
    parts: dict[int, dict[int, str]] = field(default_factory=dict)
    n_parts: dict[int, int] = field(default_factory=dict)

    def who_answered(self, seat: Seat) -> int | None:
        """Return the place of a seat that has answered in full, if any."""
        for place in seat.places:
            if place in self.n_parts and len(self.parts[place]) == self.n_parts[place]:
                return place
        return None

    def line(self, place: int) -> dict[str, Any]:
        """Say what a place answered."""
        parts = [self.parts[place][number] for number in range(self.n_parts[place])]
        asked_ns, came_ns = self.asked_ns[place], self.came_ns[place]
        return {"place": place, "asked_ns": asked_ns, "came_ns": came_ns, "parts": parts}


class Inquiries:
    """What one rank does for those who ask about other hosts, or about its own."""

    # An inquiry: accepted, its user is another one, or too many are under way --> closed
    #   greeted --a line came--> the first place of each other seat is asked
    #   asked --all answered in full, or half of the time is over--> the next place of silent seats
    #   --all answered, or the time is over--> what came is told, and who is silent

    def __init__(
        self,
        place: int,
        seats: Sequence[Seat],
        offer: Callable[[int, Mapping[str, Any], int, float], bool],
    ) -> None:
        self._place, self._offer = place, offer
        self._others = [seat for seat in seats if place not in seat.places]
        self._socket = StatusSocket.make() if self._others else None
        self._condition = Condition()
        self._under_way: dict[int, _Inquiry] = {}
        self._numbers = itertools.count(1)
        self._free = threading.Semaphore(_MOST)

    @property
    def fd(self) -> int | None:
        """What becomes readable once somebody asks; None where nobody can."""
        return None if self._socket is None else self._socket.fd

    def remove(self) -> None:
        """Stop accepting inquiries; harmless the second time."""
        if self._socket is not None:
            self._socket.remove()

    def close(self) -> None:
        """Close the socket; harmless the second time."""
        if self._socket is not None:
            self._socket.close()

    def accept(self) -> bool:
        """Let a thread serve who came."""
        # Local; doesn't wait.
        if self._socket is None:
            return False
        try:
            sock, _ = self._socket.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return True
        except OSError:
            return False
        with suppress(OSError):
            if peer(sock).is_own_user and self._start(self._serve, sock):
                return True
        sock.close()
        return True

    def handle(self, kind: int, message: Mapping[str, Any]) -> None:
        """Take a frame of another rank's or for one of this rank's inquiries."""
        # Local; doesn't wait.
        if kind == LOOK:
            self._start(self._answer, dict(message))
        elif kind == SEEN:
            self._take(message)

    def _start(self, work: Callable[[Any], None], of: Any) -> bool:
        """Have a thread do it, unless too many are at work, or the process ends."""
        if not self._free.acquire(blocking=False):
            return False

        def run() -> None:
            try:
                work(of)
            finally:
                self._free.release()

        try:
            threading.Thread(target=run, name=_NAME, daemon=True).start()
        except RuntimeError:
            self._free.release()
            return False
        return True

    def _take(self, message: Mapping[str, Any]) -> None:
        now, place = time.monotonic_ns(), int(message["of"])
        part, n_parts, body = int(message["part"]), int(message["parts"]), str(message["body"])
        with self._condition.lock:
            inquiry = self._under_way.get(int(message["id"]))
            if inquiry is not None and place in inquiry.asked_ns and 0 <= part < n_parts:
                inquiry.came_ns.setdefault(place, now)
                inquiry.n_parts[place] = n_parts
                inquiry.parts.setdefault(place, {})[part] = body
                self._condition.notify_all()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(*_CANNOT):
            sock.settimeout(_REQUEST_S)
            with sock.makefile("rwb") as lines:
                _write(lines, {"place": self._place})
                request = json.loads(lines.readline(_REQUEST_BYTES))
                for line in self._asked(request):
                    _write(lines, line)

    def _asked(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Ask the other seats, and say what they answered, and which are silent."""
        ranks, limit_s = request["ranks"], min(float(request["limit_s"]), _LONGEST_S)
        seats = [seat for seat in self._others if not ranks or {*ranks} & {*seat.places}]
        number, inquiry = next(self._numbers), _Inquiry()
        with self._condition.lock:
            self._under_way[number] = inquiry
        try:
            for turn in range(2):
                silent = [seat for seat in seats if inquiry.who_answered(seat) is None]
                for seat in silent:
                    if turn < len(seat.places):
                        self._ask(number, inquiry, seat.places[turn], request)
                self._condition.wait(
                    lambda: all(inquiry.who_answered(seat) is not None for seat in seats),
                    limit_s / 2,
                )
        finally:
            with self._condition.lock:
                del self._under_way[number]
        answered = {seat: inquiry.who_answered(seat) for seat in seats}
        yield from (inquiry.line(place) for place in answered.values() if place is not None)
        silent = [seat for seat, place in answered.items() if place is None]
        yield {"silent": [{"host": each.host, "ranks": each.places} for each in silent]}

    def _ask(self, number: int, inquiry: _Inquiry, place: int, request: Mapping[str, Any]) -> None:
        with self._condition.lock:
            inquiry.asked_ns[place] = time.monotonic_ns()
        message = {**request, "to": place, "of": self._place, "id": number}
        self._offer(LOOK, message, place, _LOOK_S)

    def _answer(self, message: Mapping[str, Any]) -> None:
        got_ns = time.monotonic_ns()
        with suppress(*_CANNOT):
            asker, found = int(message["of"]), _pages_of_this_job()
            if message["ranks"]:
                bodies = _stacks(found, message)
            else:
                bodies = [to_plain(copy) for copy in found]
            head = {"host": socket.gethostname(), "got_ns": got_ns, "sent_ns": time.monotonic_ns()}
            facts = {"to": asker, "of": self._place, "id": message["id"], "parts": len(bodies) + 1}
            for part, body in enumerate([head, *bodies]):
                frame = {**facts, "part": part, "body": packed(body)}
                if not self._offer(SEEN, frame, asker, _SEND_S):
                    break


def _write(lines: Any, plain: Mapping[str, Any]) -> None:
    lines.write(json.dumps(plain).encode() + b"\n")
    lines.flush()


def _pages_of_this_job() -> list[PageCopy]:
    """Read the pages of this host that belong to the jobs of this process."""
    found = pages()
    jobs = {page.facts.get("job") for page in found if page.facts.get("pid") == os.getpid()}
    return copied(page for page in found if page.facts.get("job") in jobs)


def _stacks(found: Sequence[PageCopy], request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Ask ranks of this host for their stacks: the text of each thread, its own thread's first."""
    newest = {
        copy.facts["rank"]: copy
        for copy in sorted(found, key=lambda copy: int(copy.facts["made_ns"]))
        if copy.vitals is not None and copy.facts["rank"] in request["ranks"]
    }
    timeout_s = min(float(request["timeout_s"]), stack_signal.LONGEST_S)
    all_threads = bool(request["all_threads"])
    texts: dict[int, dict[int, str] | None] = dict.fromkeys(newest)
    # It isn't at rest while threads of this function look at others.
    last = {rank: copy for rank, copy in newest.items() if _is_own_and_rests(copy.facts)}
    left = iter([item for item in newest.items() if item[0] not in last])

    def ask() -> None:
        for rank, copy in left:
            texts[rank] = _texts(copy, timeout_s, all_threads)

    # Unlike an executor's, threads that the interpreter doesn't wait for at its end.
    threads = [
        threading.Thread(target=ask, name=_NAME, daemon=True)
        for _ in range(min(len(newest) - len(last), _N_AT_ONCE))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + timeout_s
    for rank, copy in last.items():
        texts[rank] = _texts(copy, max(until - time.monotonic(), 0.0), all_threads)
    return [
        {"rank": rank, "stacks": None if each is None else list(each.items())}
        for rank, each in texts.items()
    ]


def _is_own_and_rests(facts: Mapping[str, Any]) -> bool:
    return bool(facts["pid"] == os.getpid() and facts.get("at_rest"))


def _texts(copy: PageCopy, timeout_s: float, all_threads: bool) -> dict[int, str] | None:
    if copy.vitals is None or copy.vitals.condition == "stopped":
        return None
    pid, own = copy.facts["pid"], copy.vitals.thread_id
    return stack_signal.texts(pid, copy.facts, own, timeout_s, all_threads)
