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
from collections.abc import Collection

from unisono.control.connection import (
    ALL,
    FAIL,
    GIVE,
    NOTICE,
    ConnectionClosed,
    read_failure,
)
from unisono.control.envelopes import START_BYTES, Blobs, join_blobs, split_blobs
from unisono.control.failure_detection import FailureDetector
from unisono.control.missing import Absent
from unisono.control.signatures import SequenceNumbers, describe
from unisono.control.tree import Peers
from unisono.errors import CollectiveError
from unisono.topology import usable_cores
from unisono.tracebacks import hides

__all__ = ("Hub", "SpinPolicy")

__tracebackhide__ = hides

_LOOK_S = 200e-6  # longer than a wake-up takes, or one slow round would make the next one slow
_MOST_NAPS = 64


class SpinPolicy:
    """What one rank has learnt of its waits.

    Where a look was in vain, the next rounds sleep at once: twice as many each time, up to 64.
    """

    def __init__(self) -> None:
        self._naps, self._next_naps = 0, 1

    def until(self) -> float:
        """Give until when to look, by ``time.monotonic()``; 0 for not at all. Local."""
        if self._naps > 0:
            self._naps -= 1
            return 0.0
        return time.monotonic() + _LOOK_S

    def learn(self, has_come: bool) -> None:
        """Take note of how a look ended. Local."""
        self._naps = 0 if has_come else self._next_naps
        self._next_naps = 1 if has_come else min(2 * self._next_naps, _MOST_NAPS)


# The leader knows more of who is missing, so it is given the time to say so first.
_WARN_LATER_S = 3.0
_GRACE_S = 0.4
_SUSPECT_S = 0.3  # until a rank that ended while others wait is asked about, and then each time
_FIRST_SLEEP_S = 0.002  # a neighbour may just have missed that this rank goes to sleep
_LONGEST_SLEEP_S = 3600.0  # `poll` takes no infinity
_NEVER = float("inf")


class Hub:
    """The control plane of one group.

    Args:
        ranks: global ranks of the group, in order of places.
        place: this rank's place.
        neighbours: the ranks it is connected to, and the processes of its host.
        warn_after_s: seconds after which a rank that waits says once which ranks are missing.
        steps: what this rank has begun on the data plane.
    """

    def __init__(
        self,
        ranks: tuple[int, ...] | range,
        place: int,
        neighbours: Peers,
        warn_after_s: float,
        steps: SequenceNumbers,
    ) -> None:
        self.all_share_memory = False
        """Whether every round goes through memory; set once the ranks know what all of them can."""
        self.compares_calls = False
        """Whether comparing calls costs little beside the data plane; set likewise."""
        self.inline_bytes = 0
        """Longest blob that a round takes; set likewise."""
        self.warn_after_s: float = warn_after_s
        self._ranks = ranks
        self._size = len(ranks)
        self._place = place
        self._links = neighbours.links
        self._below = {down: sorted(places) for down, places in neighbours.links.below.items()}
        self._subtree = sorted((place, *(far for each in self._below.values() for far in each)))
        self._lines = neighbours.lines
        self._alarm = FailureDetector(ranks, place, neighbours, steps)
        self._seq = 0
        self._lock = threading.RLock()
        self._poll = select.poll()
        self._place_of = {line.fd: other for other, line in self._lines.items()}
        self._place_of |= {fd: other for other, fd in self._alarm.pidfds.items()}
        self._ended: list[int] = []  # places of this host that no line leads to
        self._caller = 0  # the thread that is in a round
        for fd in self._place_of:
            self._poll.register(fd, select.POLLIN)
        self._patience = SpinPolicy()
        self._yields = len(neighbours.pids) >= usable_cores()  # ranks share cores

    @property
    def shares_memory(self) -> bool:
        """Whether rounds go through memory shared with each neighbour."""
        return all(line.has_lane for line in self._lines.values())

    def close(self, farewell: str = "") -> None:
        """Leave the group. Local; harmless the second time.

        Args:
            farewell: what the others hear this rank did, such as "left"; empty for no word, as of
                one that failed.
        """
        if farewell:
            self._alarm.say_farewell(farewell)
        self._alarm.close()

    def say_farewell(self, how: str) -> None:
        """Let the others know that this rank calls nothing more. Local."""
        self._alarm.say_farewell(how)

    def disown(self) -> None:
        """Close what a forked child has inherited of its parent's. Local."""
        self._alarm.disown()

    def gone(
        self, ranks: Collection[int] | None = None, group: str = "", step: int = 0
    ) -> Absent | None:
        """Tell which rank is known to be gone, if any.

        Local; doesn't wait.

        Args:
            ranks: global ranks that count; None for all of the group.
            group: the name of the group whose operation waits.
            step: its number there: ranks that had done it before they left don't count.
        """
        alarm = self._alarm
        if alarm.gone is None:
            try:
                if self._lock.acquire(blocking=False) and alarm.failure is None:
                    with contextlib.suppress(CollectiveError):
                        among = None if ranks is None else self._places(ranks)
                        alarm.look_around(among, group, step)
            finally:
                # A call in Python could be interrupted before it begins, as `suppress` is.
                try:  # noqa: SIM105
                    self._lock.release()
                except RuntimeError:  # it isn't this thread's
                    pass
        absent = alarm.gone
        return absent if absent is None or ranks is None or absent.rank in ranks else None

    def late(self, group: str, ranks: tuple[int, ...], step: int, is_over: bool) -> str:
        """Say which ranks haven't come to an operation of the data plane.

        Local; waits a second at most.

        Args:
            group: the name of the group that it is in.
            ranks: those of the group, ``()`` for all ranks.
            step: its number there.
            is_over: whether its time is over, which all ranks then learn.
        """
        return self._alarm.late(self._places(ranks or self._ranks), group, step, is_over)

    def _places(self, ranks: Collection[int]) -> list[int]:
        return [place for place, rank in enumerate(self._ranks) if rank in ranks]

    def exchange(self, blob: bytes, until: float) -> Blobs:
        """Give every rank the blobs of all, in order of places.

        Collective over the group.

        Args:
            blob: this rank's.
            until: when to give up, by ``time.monotonic()``.

        Returns:
            The blobs, long ones as views, and their sizes; of one over `inline_bytes` the start.

        Raises:
            PeerFailedError: a rank is gone.
            CollectiveTimeoutError: ranks didn't come in time; names them.
            CollectiveError: an earlier round was interrupted, or another thread is in one.
        """
        alarm = self._alarm
        try:  # an interrupt may come just after the lock was taken: it knows whose it is
            if not self._lock.acquire(blocking=False):
                self._wait_for_turn(blob, until)
            if self._caller:
                alarm.refuse_nested(blob)
            size = len(blob)
            given = blob if size <= self.inline_bytes else blob[:START_BYTES]
            alarm.enter(self._seq + 1, given)
            self._caller = threading.get_ident()
            self._seq += 1
            try:
                return self._round(given, size, until)
            except CollectiveError:
                raise
            except BaseException as error:  # Ctrl-C above all: half a round can't be taken back
                alarm.interrupt(f"{type(error).__name__} interrupted {describe(blob)}", True)
                raise
            finally:
                self._caller = 0
                alarm.leave()
        finally:
            # A call in Python could be interrupted before it begins, as `suppress` is.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:  # it isn't this thread's
                pass

    def _wait_for_turn(self, blob: bytes, until: float) -> None:
        self._alarm.clash(self._caller, blob)
        left_s = max(0.0, until - time.monotonic())
        if not self._lock.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
            self._alarm.refuse_late(blob)

    def interrupt(self, how: str) -> None:
        """Take note that this rank comes no more, and tell the others. Local."""
        try:  # another thread may be sending
            self._alarm.interrupt(how, is_alone=self._lock.acquire(blocking=False))
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
            gathered = self._gather(blob, size, until)
        if up is not None:
            self._say(GIVE, up, join_blobs(*gathered), until)
            gathered = self._hear(ALL, (up,), until)[up]
        if downs:
            body = join_blobs(*gathered)
            for down in downs:
                self._say(ALL, down, body, until)
        return gathered

    def _gather(self, blob: bytes, size: int, until: float) -> Blobs:
        """Wait for the blobs of all below; give them with this rank's own, in order of places."""
        blobs, sizes = [b""] * self._size, [0] * self._size
        blobs[self._place], sizes[self._place] = blob, size
        for down, given in self._hear(GIVE, self._links.downs, until).items():
            for place, each, each_size in zip(self._below[down], *given, strict=True):
                blobs[place], sizes[place] = each, each_size
        if len(self._subtree) == self._size:
            return blobs, sizes
        return [blobs[at] for at in self._subtree], [sizes[at] for at in self._subtree]

    def _hear(self, kind: int, places: tuple[int, ...], until: float) -> dict[int, Blobs]:
        """Wait for one message of `kind` from each of `places`; give what is in them."""
        got: dict[int, Blobs] = {}
        end = self._patience.until()
        if end:
            self._look(kind, places, got, end)
        if len(got) < len(places):
            later_s = _WARN_LATER_S if kind == ALL else 0.0
            warn_at = time.monotonic() + self.warn_after_s + later_s
            self._sleep(kind, places, got, until, warn_at)
        return got

    def _look(self, kind: int, places: tuple[int, ...], got: dict[int, Blobs], end: float) -> None:
        """Look without sleeping, as long as that has been worth it."""
        while len(got) < len(places):
            for place in places:
                if place not in got and self._lines[place].may_hold():
                    self._take(place, kind, places, got)
            if time.monotonic() > end:
                break
            if self._yields:
                os.sched_yield()
        self._patience.learn(len(got) == len(places))

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
        look_at, has_grace = time.monotonic() + _SUSPECT_S, kind == ALL
        self._alarm.waits = (places, got)
        for place in places:
            self._lines[place].sleep(True)
        self._look_at(kind, places, got)
        while len(got) < len(places):
            now = time.monotonic()
            if now >= until:
                states = self._alarm.ask(places, got)
                self._look_at(kind, places, got)  # who answered may have been the first to give up
                if len(got) == len(places):
                    break
                is_there = bool(states) and all(s.seq >= self._seq for s in states.values())
                if not (has_grace and is_there):
                    self._alarm.time_out(places, got, states)
                has_grace, until = False, time.monotonic() + _GRACE_S
            if kind == ALL and self._ended and now >= look_at:
                look_at = now + _SUSPECT_S
                if self._alarm.is_behind(places[0]):  # so it can't have left with the answer
                    self._alarm.lose(self._ended[0])
            if now >= warn_at:
                warn_at = _NEVER
                self._alarm.warn(places, got)
            ends = (until, warn_at, look_at if self._ended else _NEVER)
            events = self._poll.poll(max(0.0, min(min(ends) - now, wait_s)) * 1000)
            for fd, _ in events:
                self._on_event(fd, kind, places, got)
            if not events:
                wait_s = _LONGEST_SLEEP_S
                self._look_at(kind, places, got)
        for place in places:
            self._lines[place].sleep(False)

    def _look_at(self, kind: int, places: tuple[int, ...], got: dict[int, Blobs]) -> None:
        """Take what came while this rank was elsewhere, or was falling asleep."""
        for place in places:
            if place not in got:
                self._take(place, kind, places, got)

    def _on_event(self, fd: int, kind: int, places: tuple[int, ...], got: dict[int, Blobs]) -> None:
        place = self._place_of[fd]
        if place in self._lines:
            self._take(place, kind, places, got, is_gone=fd != self._lines[place].fd)
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
            while (frame := self._lines[place].take()) is not None:
                if frame[0] == NOTICE:
                    self._alarm.hand_on(frame[2], place)
                elif frame[0] == FAIL:
                    self._alarm.fail(read_failure(frame[2]), place)
                elif frame[:2] == (kind, self._seq) and place in places and place not in got:
                    count = self._size if kind == ALL else len(self._below[place])
                    got[place] = split_blobs(frame[2], count, self.inline_bytes)
                    if not is_gone:
                        return
                else:
                    raise ConnectionClosed(f"it sent frame {frame[0]} of round {frame[1]}")
        except (ConnectionClosed, ValueError) as closed:
            is_gone, how = True, str(closed)
        # A peer that sent GIVE still waits for ALL, so its exit is a failure; one that sent ALL
        # may exit.
        if is_gone and not (kind == ALL and place in got):
            self._alarm.lose(place, how)

    def _say(self, kind: int, place: int, body: bytes, until: float) -> None:
        try:
            self._lines[place].send(kind, self._seq, body, until)
        except ConnectionClosed as closed:
            self._take(place, NOTICE, (), {})  # it may have said why
            self._alarm.lose(place, str(closed))
        except TimeoutError:
            self._alarm.jam(place)
