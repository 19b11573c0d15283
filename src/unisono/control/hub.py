"""One rank's part of a group's control plane: rounds over sockets, and who is missing in them.

In a round every rank gives its blob to whom it is connected upwards, together with what came from
below; the root sends all of it down again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from typing import NoReturn

from unisono.control import calls
from unisono.control.absence import Absent, Missing, has_ended, report, watch
from unisono.control.aside import Aside, place_in, stack_of
from unisono.control.neighbours import Neighbours
from unisono.control.wire import (
    ALL,
    FAIL,
    GIVE,
    NOTICE,
    Line,
    LineClosed,
    entry,
    read_entries,
    read_failure,
)
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

__all__ = ("Hub",)

_log = logging.getLogger(__name__)
# The leader knows more of who is missing, so it is given the time to say so first.
_GRACE_S = 3.0
_LAST_WORD_S = 0.1
_SPIN_S = 50e-6
_MOST_NAPS = 64
_LATE_S = 1.0  # for the root to ask everybody, and to tell
_NEVER = float("inf")


class Hub:
    """The control plane of one group.

    Args:
        ranks: global ranks of the group, in order of places.
        place: this rank's place.
        neighbours: whom it can see.
    """

    def __init__(self, ranks: tuple[int, ...] | range, place: int, neighbours: Neighbours) -> None:
        self._ranks = ranks
        self._place = place
        self._links = neighbours.links
        self._lines = neighbours.lines
        self._pids = neighbours.pids
        self._seq = 0
        self._failure: CollectiveError | None = None
        self._gone: Absent | None = None
        self._lock = threading.Lock()
        self._aside = Aside(neighbours.asides)
        self._pidfds = watch(neighbours.pids)
        self._poll = select.poll()
        self._place_of = {line.fd: other for other, line in self._lines.items()}
        for other, fd in self._pidfds.items():
            if other in self._lines:
                self._place_of[fd] = other
        for fd in self._place_of:
            self._poll.register(fd, select.POLLIN)
        self._blob = b""
        self._is_told = False
        self._has_cores = len(self._pids) < (os.cpu_count() or 1)
        self._naps, self._patience = 0, 1
        self._close = weakref.finalize(
            self, _close, self._aside, list(self._lines.values()), list(self._pidfds.values())
        )
        self._close.atexit = False

    def close(self) -> None:
        """Leave the group. Local; harmless the second time."""
        self._close()

    def exchange(self, blob: bytes, limit_s: float, warn_after_s: float) -> list[bytes]:
        """Give every rank the blobs of all, in order of places.

        Collective over the group.

        Args:
            blob: this rank's.
            limit_s: seconds to wait for the others.
            warn_after_s: seconds after which those who wait say whom they wait for.

        Returns:
            The blobs.

        Raises:
            PeerFailedError: a rank is gone.
            CollectiveTimeoutError: ranks didn't come in time; names them.
        """
        with self._lock:
            if self._failure is not None:
                raise type(self._failure)(*self._failure.args)
            self._seq += 1
            self._blob = blob
            self._aside.thread_id = threading.get_ident()
            start = time.monotonic()
            until, warn_at = start + limit_s, start + warn_after_s
            up, downs = self._links.up, self._links.downs
            bundle = entry(self._place, blob)
            blobs = {self._place: blob}
            if downs:
                for down, given in self._hear(GIVE, downs, until, warn_at).items():
                    blobs |= self._read(given, down, self._links.below[down])
                    bundle += given
            if up is not None:
                self._say(GIVE, up, bundle, until)
                bundle = self._hear(ALL, (up,), until + _GRACE_S, warn_at + _GRACE_S)[up]
                blobs = self._read(bundle, up, range(len(self._ranks)))
            for down in downs:
                self._say(ALL, down, bundle, until)
            return [blobs[place] for place in range(len(self._ranks))]

    def gone(self) -> Absent | None:
        """Tell which rank of the group is known to be gone, if any.

        Local; doesn't wait.
        """
        if self._gone is None and self._lock.acquire(blocking=False):
            try:
                if self._failure is None:
                    with contextlib.suppress(CollectiveError):
                        self._look_around()
            finally:
                self._lock.release()
        return self._gone

    def late(self) -> str:
        """Say which neighbours aren't where this rank is, when the data plane's time is over.

        Local; waits a second at most. The root finds out, and tells those that it serves.
        """
        if self._links.up is not None:
            said = self._aside.failure(_LATE_S)
            return "" if said is None else str(read_failure(said)["text"])
        here = place_in(stack_of(threading.get_ident()))
        stacks = self._aside.ask(self._links.downs)
        absent = [p for p in self._links.downs if here not in stacks.get(p, "")]
        text = "\n".join(str(self._missing(place, stacks)) for place in absent)
        self._aside.tell(json.dumps({"kind": "timeout", "text": text}).encode())
        return text

    def _look_around(self) -> None:
        """Notice who is gone, and leave what neighbours say of rounds.

        What others say comes first: some may have left because of the one that is gone.
        """
        ended = [place for place, fd in self._pidfds.items() if has_ended(fd)]
        said = self._aside.failure(_LAST_WORD_S if len(ended) > 1 else 0.0)
        if said is not None:
            self._fail(read_failure(said))
        if ended:
            self._lose(self._absent(ended[0]))
        for place, line in self._lines.items():
            if line.is_closed():
                self._lose(self._absent(place, "it closed the connection"))

    def _hear(
        self, kind: int, places: tuple[int, ...], until: float, warn_at: float
    ) -> dict[int, bytes]:
        """Wait for one frame of `kind` from each of `places`; give their bodies."""
        got: dict[int, bytes] = {}
        self._is_told = False
        for place in places:
            if self._lines[place].holds_data:  # came while this rank was elsewhere
                self._on_event(self._lines[place].fd, kind, places, got)
        self._look_for_a_while(kind, places, got)
        while len(got) < len(places):
            now = time.monotonic()
            for fd, _ in self._poll.poll(max(0.0, min(until, warn_at) - now) * 1000):
                self._on_event(fd, kind, places, got)
            if len(got) == len(places):
                break
            now = time.monotonic()
            if now >= until:
                text = self._report(places, got)
                self._fail({"kind": "timeout", "text": f"the deadline is over.\n{text}"})
            if now >= warn_at:
                warn_at = _NEVER
                self._warn(places, got)
        return got

    def _look_for_a_while(self, kind: int, places: tuple[int, ...], got: dict[int, bytes]) -> None:
        """Look without sleeping, which saves being woken where every rank has a core to itself.

        Where that was in vain, the next rounds sleep at once: once more each time, up to a limit.
        """
        if not self._has_cores or self._naps > 0:
            self._naps = max(0, self._naps - 1)
            return
        end = time.monotonic() + _SPIN_S
        while len(got) < len(places) and time.monotonic() < end:
            for place in places:
                if place not in got:
                    self._on_event(self._lines[place].fd, kind, places, got)
        self._patience = 1 if len(got) == len(places) else min(2 * self._patience, _MOST_NAPS)
        self._naps = 0 if self._patience == 1 else self._patience

    def _on_event(self, fd: int, kind: int, places: tuple[int, ...], got: dict[int, bytes]) -> None:
        place = self._place_of[fd]
        line = self._lines[place]
        how = ""
        is_gone = fd != line.fd
        try:
            while (frame := line.take()) is not None:
                if frame[0] == NOTICE:
                    self._tell(frame[2], place)
                elif frame[0] == FAIL:
                    self._fail(read_failure(frame[2]), place)
                elif frame[:2] == (kind, self._seq) and place in places and place not in got:
                    got[place] = frame[2]
                    if not is_gone:
                        return
                else:
                    raise LineClosed(f"it sent frame {frame[0]} of round {frame[1]}")
        except LineClosed as closed:
            is_gone, how = True, str(closed)
        # Whoever gave waits for the answer and can't be done; whoever answered may be.
        if is_gone and not (kind == ALL and place in got):
            self._lose(self._absent(place, how))

    def _read(self, bundle: bytes, source: int, expected: Collection[int]) -> dict[int, bytes]:
        """Take a bundle apart; whoever sends one that is damaged is lost."""
        try:
            blobs = read_entries(bundle)
            if blobs.keys() == set(expected):
                return blobs
            how = f"it sent blobs of places {sorted(blobs)}"
        except LineClosed as damage:
            how = str(damage)
        self._lose(self._absent(source, how))

    def _tell(self, body: bytes, source: int) -> None:
        """Log what a neighbour says of a long wait, and hand it down."""
        self._is_told = True
        _log.warning("%s", body.decode("utf-8", "replace"))
        for place in self._links.downs:
            if place != source:
                with contextlib.suppress(LineClosed, TimeoutError):
                    self._lines[place].send(NOTICE, self._seq, body, time.monotonic() + 1)

    def _absent(self, place: int, how: str = "") -> Absent:
        rank, pid = self._ranks[place], self._pids.get(place)
        who = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid} on this host)"
        ended = pid is not None and place in self._pidfds and has_ended(self._pidfds[place])
        return Absent(rank, f"{who} has ended" if ended else f"{who} is gone: {how}")

    def _say(self, kind: int, place: int, body: bytes, until: float) -> None:
        try:
            self._lines[place].send(kind, self._seq, body, until)
        except LineClosed as closed:
            self._on_event(self._lines[place].fd, NOTICE, (), {})  # it may have said why
            self._lose(self._absent(place, str(closed)))
        except TimeoutError:
            late = Missing(self._ranks[place], pid=self._pids.get(place))
            text = f"the deadline is over, and what came isn't read:\n{late}"
            self._fail({"kind": "timeout", "text": text})

    def _me(self) -> str:
        return f"rank {self._ranks[self._place]} of {len(self._ranks)}"

    def _lose(self, absent: Absent) -> NoReturn:
        self._fail({"kind": "peer", "rank": absent.rank, "text": absent.how})

    def _fail(self, said: dict[str, object], source: int | None = None) -> NoReturn:
        """Tell all neighbours but the one that said so, then raise."""
        body = json.dumps(said).encode()
        self._aside.tell(body)
        for place, line in self._lines.items():
            if place != source:
                with contextlib.suppress(LineClosed, TimeoutError):
                    line.send(FAIL, self._seq, body, time.monotonic() + 1)
        text = f"{self._me()}, in {calls.describe(self._blob)}: {said['text']}"
        if said["kind"] == "peer":
            self._gone = Absent(int(str(said["rank"])), str(said["text"]))
            self._failure = PeerFailedError(text, self._gone.rank)
        else:
            self._failure = CollectiveTimeoutError(text)
        raise self._failure

    def _warn(self, places: tuple[int, ...], got: Mapping[int, bytes]) -> None:
        if self._is_told:
            return
        call = calls.describe(self._blob)
        text = f"{self._me()} is still waiting in {call}\n{self._report(places, got)}"
        _log.warning("%s", text)
        for place in got:
            with contextlib.suppress(LineClosed, TimeoutError):
                self._lines[place].send(NOTICE, self._seq, text.encode(), time.monotonic() + 1)

    def _missing(self, place: int, stacks: Mapping[int, str]) -> Missing:
        behind = [self._ranks[other] for other in self._links.below.get(place, ())[1:]]
        return Missing(self._ranks[place], behind, self._pids.get(place), stacks.get(place, ""))

    def _report(self, places: tuple[int, ...], got: Mapping[int, bytes]) -> str:
        """Say who has come with which call, who has not, and where those are."""
        absent = [place for place in places if place not in got]
        stacks = self._aside.ask(absent)
        came = {self._place: self._blob}
        for bundle in got.values():
            with contextlib.suppress(LineClosed):
                came |= read_entries(bundle)
        missing = [self._missing(place, stacks) for place in absent]
        by_rank = {self._ranks[place]: blob for place, blob in came.items()}
        return report(f"round {self._seq} of the group of {len(self._ranks)}", by_rank, missing)


def _close(aside: Aside, lines: list[Line], pidfds: list[int]) -> None:
    aside.close()
    for line in lines:
        line.close()
    for fd in pidfds:
        os.close(fd)
