"""One rank's part of a group's control plane: rounds, in which every rank gives and gets all.

A round has three states. GIVE: a rank waits for the blobs of all ranks below it, and passes them up
with its own. ALL: it waits for the blobs of all ranks from above, which the root has sent once it
has them. Then it passes these down, and the round is over. A rank without a rank below it begins
with ALL, the root ends with GIVE. A failure, or the deadline, ends every later round as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Collection

from unisono.control.connection import (
    ALL,
    FAIL,
    GIVE,
    NOTICE,
    ConnectionClosed,
    Frame,
    read_failure,
)
from unisono.control.envelopes import START_BYTES, Blobs, join_blobs, split_blobs
from unisono.control.failure_detection import FailureDetector
from unisono.control.missing import Absent
from unisono.control.signatures import SequenceNumbers, describe
from unisono.control.tree import Peers
from unisono.deadlines import host_s
from unisono.errors import CollectiveError
from unisono.host.arena import Arena
from unisono.topology import usable_cores
from unisono.tracebacks import hides

__tracebackhide__ = hides

_SPIN_S = 200e-6  # longer than a wake-up takes, or one slow round would make the next one slow
_MOST_NAPS = 64


class SpinPolicy:
    """What one rank has learnt of its waits."""

    # Where spinning was in vain, the next waits sleep at once: twice as many each time, up to 64.

    def __init__(self) -> None:
        self.naps: int = 0
        """How many of the next waits sleep at once."""
        self._next_naps = 1

    def learn(self, has_come: bool) -> None:
        """Take note of how spinning ended."""
        self.naps = 0 if has_come else self._next_naps
        self._next_naps = 1 if has_come else min(2 * self._next_naps, _MOST_NAPS)


# The leader knows more of who is missing, so it is given the time to say so first.
_WARN_LATER_S = 3.0
_GRACE_S = 0.4
_SUSPECT_S = 0.3  # until a rank that ended while others wait is asked about, and then each time
_FIRST_SLEEP_S = 0.002  # a neighbour may just have missed that this rank goes to sleep
_LONGEST_SLEEP_S = 3600.0  # `poll` takes no infinity
_NEVER = float("inf")


class Hub:
    """The control plane of one group."""

    def __init__(
        self,
        ranks: tuple[int, ...] | range,
        place: int,
        peers: Peers,
        warn_after_s: float,
        steps: SequenceNumbers,
    ) -> None:
        self.all_share_memory = False
        """Whether every round goes through memory; set once the ranks know what all of them can."""
        self.compares_calls = False
        """Whether comparing calls costs little beside the data plane; set likewise."""
        self.checks: bool | None = None
        """Whether ranks compare calls before each collective, as their users want it."""
        self.arena: Arena | None = peers.arena
        """Memory for tensors that the ranks of this host share, if they do."""
        self.hosts: list[list[int]] = []
        """Ranks by host, where those of every host share memory for tensors; set likewise."""
        self.inline_bytes = 0
        """Longest blob that a round takes; set likewise."""
        self.warn_after_s: float = warn_after_s
        self._ranks = ranks
        self._size = len(ranks)
        self._place = place
        self._links = peers.links
        self._below = {down: sorted(places) for down, places in peers.links.below.items()}
        self._subtree = sorted((place, *(far for each in self._below.values() for far in each)))
        self._connections = peers.connections
        self._detector = FailureDetector(ranks, place, peers, steps)
        self._seq = 0
        self._lock = threading.RLock()
        self._poll = select.poll()
        self._place_of = {connection.fd: other for other, connection in self._connections.items()}
        self._place_of |= {fd: other for other, fd in self._detector.pidfds.items()}
        self._ended: list[int] = []  # places of this host that no connection leads to
        self._caller = 0  # the thread that is in a round
        for fd in self._place_of:
            self._poll.register(fd, select.POLLIN)
        self._spins = SpinPolicy()
        self._yields = len(peers.pids) >= usable_cores()  # ranks share cores

    @property
    def shares_memory(self) -> bool:
        """Whether rounds go through memory shared with each neighbour."""
        return all(connection.mailbox is not None for connection in self._connections.values())

    def close(self, farewell: str = "") -> None:
        """Leave the group; harmless the second time."""
        if farewell:
            self._detector.say_farewell(farewell)
        self._detector.close()

    def say_farewell(self, how: str) -> None:
        """Let the others know that this rank calls nothing more."""
        self._detector.say_farewell(how)

    def disown(self) -> None:
        """Close what a forked child has inherited of its parent's."""
        self._detector.disown()

    def gone(
        self, ranks: Collection[int] | None = None, group: str = "", step: int = 0
    ) -> Absent | None:
        """Tell which rank is known to be gone, if any."""
        # Local; doesn't wait.
        detector = self._detector
        if detector.gone is None:
            try:
                if self._lock.acquire(blocking=False) and detector.failure is None:
                    with contextlib.suppress(CollectiveError):
                        among = None if ranks is None else self._places(ranks)
                        detector.raise_if_gone(among, group, step)
            finally:
                # A call in Python could be interrupted before it begins, as `suppress` is.
                try:  # noqa: SIM105
                    self._lock.release()
                except RuntimeError:  # it isn't this thread's
                    pass
        absent = detector.gone
        return absent if absent is None or ranks is None or absent.rank in ranks else None

    def late(self, group: str, ranks: tuple[int, ...], step: int, is_over: bool) -> str:
        """Say which ranks haven't come to an operation of the data plane."""
        # Local; waits a second at most.
        return self._detector.late(self._places(ranks or self._ranks), group, step, is_over)

    def _places(self, ranks: Collection[int]) -> list[int]:
        return [place for place, rank in enumerate(self._ranks) if rank in ranks]

    def exchange(self, blob: bytes, until: float) -> Blobs:
        """Give every rank the blobs of all, in order of places. Collective over the group."""
        detector = self._detector
        try:  # an interrupt may come just after the lock was taken: it knows whose it is
            if not self._lock.acquire(blocking=False):
                self._wait_for_turn(blob, until)
            if self._caller:
                detector.raise_nested(blob)
            size = len(blob)
            given = blob if size <= self.inline_bytes else blob[:START_BYTES]
            detector.enter(self._seq + 1, given)
            self._caller = threading.get_ident()
            self._seq += 1
            try:
                return self._round(given, size, until)
            except CollectiveError:
                raise
            except BaseException as error:  # Ctrl-C above all: half a round can't be taken back
                detector.interrupt(f"{type(error).__name__} interrupted {describe(blob)}", True)
                raise
            finally:
                self._caller = 0
                detector.leave()
        finally:
            # A call in Python could be interrupted before it begins, as `suppress` is.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:  # it isn't this thread's
                pass

    def _wait_for_turn(self, blob: bytes, until: float) -> None:
        self._detector.raise_if_concurrent(self._caller, blob)
        left_s = max(0.0, until - time.monotonic())
        if not self._lock.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
            self._detector.raise_not_begun(blob)

    @property
    def failure(self) -> CollectiveError | None:
        """What every later round raises; None while nothing has failed."""
        return self._detector.failure

    def interrupt(self, how: str) -> None:
        """Take note that this rank comes no more, and tell the others."""
        self._tell(self._detector.interrupt, how)

    def give_up(self, text: str) -> None:
        """Take note that the time of an operation is over for all ranks, and tell them."""
        self._tell(self._detector.give_up, text)

    def _tell(self, tell: Callable[[str, bool], None], text: str) -> None:
        try:  # another thread may be sending
            tell(text, self._lock.acquire(blocking=False))
        finally:
            # A call in Python could be interrupted before it begins, as `suppress` is.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:  # it isn't this thread's
                pass

    def _round(self, blob: bytes, size: int, until: float) -> Blobs:
        up, downs = self._links.up, self._links.downs
        gathered: Blobs = (blob,), (size,)
        if downs:
            blobs, sizes = [b""] * self._size, [0] * self._size
            blobs[self._place], sizes[self._place] = blob, size
            for down, given in self._receive(GIVE, downs, until).items():
                for place, each, each_size in zip(self._below[down], *given, strict=True):
                    blobs[place], sizes[place] = each, each_size
            gathered = blobs, sizes
            if len(self._subtree) < self._size:
                gathered = [blobs[at] for at in self._subtree], [sizes[at] for at in self._subtree]
        if up is not None:
            self._send(GIVE, up, join_blobs(*gathered), until)
            gathered = self._receive(ALL, (up,), until)[up]
        if downs:
            body = join_blobs(*gathered)
            for down in downs:
                self._send(ALL, down, body, until)
        return gathered

    def _receive(self, kind: int, places: tuple[int, ...], until: float) -> dict[int, Blobs]:
        """Wait for one message of `kind` from each of `places`; give what is in them."""
        got: dict[int, Blobs] = {}
        spins = self._spins
        if spins.naps:
            spins.naps -= 1
        else:
            spin_until = time.monotonic() + _SPIN_S
            for place in places:
                self._spin(place, kind, places, got, spin_until)
            spins.learn(len(got) == len(places))
        if len(got) < len(places):
            later_s = _WARN_LATER_S if kind == ALL else 0.0
            warn_at = time.monotonic() + host_s(self.warn_after_s) + later_s
            self._sleep(kind, places, got, until, warn_at)
        return got

    def _spin(
        self, place: int, kind: int, places: tuple[int, ...], got: dict[int, Blobs], until: float
    ) -> None:
        """Look for the message of one neighbour without sleeping."""
        connection = self._connections[place]
        mailbox = connection.mailbox  # where there is one, the socket is read only before sleeping
        take = connection.take if mailbox is None else mailbox.take
        try:
            while place not in got:
                frame = take()
                if frame is not None:
                    self._accept(frame, place, kind, places, got)
                elif time.monotonic() > until:
                    break
                elif self._yields:
                    os.sched_yield()
        except (ConnectionClosed, ValueError) as closed:
            self._detector.raise_gone(place, str(closed))

    def _sleep(
        self,
        kind: int,
        places: tuple[int, ...],
        got: dict[int, Blobs],
        until: float,
        warn_at: float,
    ) -> None:
        """Sleep until all have come, and say so to those that could go unnoticed."""
        wait_s = _FIRST_SLEEP_S
        suspect_at, has_grace = time.monotonic() + _SUSPECT_S, kind == ALL
        self._detector.waits = (places, got)
        for place in places:
            self._connections[place].sleep(True)
        self._take_all(kind, places, got)
        while len(got) < len(places):
            now = time.monotonic()
            if now >= until:
                states = self._detector.ask(places, got)
                self._take_all(kind, places, got)  # who answered may have been the first to give up
                if len(got) == len(places):
                    break
                is_there = bool(states) and all(s.seq >= self._seq for s in states.values())
                if not (has_grace and is_there):
                    self._detector.raise_timeout(places, got, states)
                has_grace, until = False, time.monotonic() + _GRACE_S
            if kind == ALL and self._ended and now >= suspect_at:
                suspect_at = now + _SUSPECT_S
                if self._detector.is_behind(places[0]):  # so it can't have left with the answer
                    self._detector.raise_gone(self._ended[0])
            if now >= warn_at:
                warn_at = _NEVER
                self._detector.warn(places, got)
            ends = (until, warn_at, suspect_at if self._ended else _NEVER)
            events = self._poll.poll(max(0.0, min(min(ends) - now, wait_s)) * 1000)
            for fd, _ in events:
                self._on_event(fd, kind, places, got)
            if not events:
                wait_s = _LONGEST_SLEEP_S
                self._take_all(kind, places, got)
        for place in places:
            self._connections[place].sleep(False)

    def _take_all(self, kind: int, places: tuple[int, ...], got: dict[int, Blobs]) -> None:
        """Take what came while this rank was elsewhere, or was falling asleep."""
        for place in places:
            if place not in got:
                self._take(place, kind, places, got)

    def _on_event(self, fd: int, kind: int, places: tuple[int, ...], got: dict[int, Blobs]) -> None:
        place = self._place_of[fd]
        if place in self._connections:
            self._take(place, kind, places, got, is_gone=fd != self._connections[place].fd)
        else:
            self._poll.unregister(fd)
            self._ended.append(place)

    def _take(
        self,
        place: int,
        kind: int,
        places: tuple[int, ...],
        got: dict[int, Blobs],
        is_gone: bool = False,
    ) -> None:
        """Take what a neighbour has sent; fail where it is gone, or sent what it shouldn't."""
        how = ""
        try:
            while (frame := self._connections[place].take()) is not None:
                if self._accept(frame, place, kind, places, got) and not is_gone:
                    return
        except (ConnectionClosed, ValueError) as closed:
            is_gone, how = True, str(closed)
        # A peer that sent GIVE still waits for ALL, so its exit is a failure; one that sent ALL
        # may exit.
        if is_gone and not (kind == ALL and place in got):
            self._detector.raise_gone(place, how)

    def _accept(
        self,
        frame: Frame,
        place: int,
        kind: int,
        places: tuple[int, ...],
        got: dict[int, Blobs],
    ) -> bool:
        """Handle one frame of a neighbour; tell whether it is the one that is waited for."""
        if frame[0] == NOTICE:
            self._detector.forward_warning(frame[2], place)
            return False
        if frame[0] == FAIL:
            self._detector.raise_failure(read_failure(frame[2]), place)
        if frame[:2] != (kind, self._seq) or place not in places or place in got:
            raise ConnectionClosed(f"it sent frame {frame[0]} of round {frame[1]}")
        count = self._size if kind == ALL else len(self._below[place])
        got[place] = split_blobs(frame[2], count, self.inline_bytes)
        return True

    def _send(self, kind: int, place: int, body: bytes, until: float) -> None:
        try:
            self._connections[place].send(kind, self._seq, body, until)
        except ConnectionClosed as closed:
            self._take(place, NOTICE, (), {})  # it may have said why
            self._detector.raise_gone(place, str(closed))
        except TimeoutError:
            self._detector.raise_blocked(place)
