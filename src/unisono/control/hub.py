"""One rank's part of a group's control plane: rounds, each an all-gather of blobs.

A round has two states. GIVE: a rank waits for the blobs of all ranks below it, and passes them up
with its own. ALL: it waits for the blobs of all ranks from above, which the root has sent once it
has them. Then it passes these down, and the round is over. A rank without a rank below it begins
with ALL, the root ends with GIVE. A failure, or the deadline, ends every later round as well.
"""

from __future__ import annotations

import os
import select
import time
import weakref

from unisono.control.connection import (
    ALL,
    FAIL,
    GIVE,
    NOTICE,
    START_BYTES,
    Blobs,
    ConnectionClosed,
    Frame,
    join_blobs,
    read_failure,
    split_blobs,
)
from unisono.control.handshake import LONGEST_WAIT_S
from unisono.control.peers import Peers
from unisono.control.signatures import describe
from unisono.deadlines import host_s
from unisono.errors import CollectiveError
from unisono.host.arena import Arena
from unisono.tracebacks import hides

__tracebackhide__ = hides

_SPIN_S = 200e-6  # longer than a wake-up takes, or one slow round would make the next one slow
# The rank above knows more about missing ranks, so it has time to warn or raise first.
_WARN_LATER_S = 3.0
_GRACE_S = 0.4
_SUSPECT_S = 0.3  # between questions about a rank that ended while this one waits
_FIRST_SLEEP_S = 0.002  # a neighbour may just have missed that this rank goes to sleep
_NEVER = float("inf")


class Hub:
    """The control plane of one group."""

    def __init__(self, peers: Peers, arena: Arena | None, warn_after_s: float) -> None:
        self.all_share_memory = False
        """Whether every round goes through memory; set once all ranks have voted."""
        self.compares_calls = False
        """Whether comparing calls costs little beside the data plane; set after the vote."""
        self.checks: bool | None = None
        """Whether ranks compare calls before each collective; None for no setting."""
        self.arena: Arena | None = arena
        """Memory for tensors that the ranks of this host share; None if they share none."""
        self.hosts: list[list[int]] = []
        """Ranks by host, if those of every host share memory for tensors, else empty; set after the
        vote."""
        self.inline_bytes = 0
        """Longest blob that a round carries; set after the vote."""
        self.warn_after_s: float = warn_after_s
        self.peers: Peers = peers
        # Closes a hub that was dropped unclosed; at exit the end of the process does that.
        weakref.finalize(self, peers.close).atexit = False
        below, position = peers.links.below, peers.position
        self._size = len(peers.ranks)
        # Sorted, as bodies hold blobs by position, while `links.below` begins with the neighbour.
        self._below = {down: sorted(positions) for down, positions in below.items()}
        self._subtree = sorted((position, *(far for each in below.values() for far in each)))
        self._connections = peers.rounds
        self._kind = NOTICE  # of no round: nothing is awaited yet
        self._poll = select.poll()
        self._position_of = {each.fd: other for other, each in self._connections.items()}
        self._position_of |= {fd: other for other, fd in peers.pidfds.items()}
        self._ended: list[int] = []  # ranks of this host that aren't neighbours
        for fd in self._position_of:
            self._poll.register(fd, select.POLLIN)

    @property
    def shares_memory(self) -> bool:
        """Whether rounds go through memory shared with each neighbour."""
        return all(connection.mailbox is not None for connection in self._connections.values())

    def exchange(self, blob: bytes, until: float) -> Blobs:
        """Return the blobs of all ranks in order of positions. Collective over the group."""
        peers, size = self.peers, len(blob)
        given = blob if size <= self.inline_bytes else blob[:START_BYTES]  # enough to name the call
        try:  # an interrupt may come just after the acquire: the lock knows its owner
            if not peers.lock.acquire(blocking=False):
                peers.wait_for_turn(blob, until)
            peers.enter(given)
            try:
                return self._round(given, size, until)
            finally:
                peers.leave()
        except CollectiveError:  # `Peers` has reported it already
            raise
        except BaseException as error:  # Ctrl-C above all: half a round can't be undone
            peers.interrupt(f"{type(error).__name__} interrupted {describe(blob)}")
            raise
        finally:
            # Not `suppress`, which is a call in Python: an interrupt could come before it begins.
            try:  # noqa: SIM105
                peers.lock.release()
            except RuntimeError:  # another thread holds it, or none
                pass

    def _round(self, blob: bytes, size: int, until: float) -> Blobs:
        """Pass blobs up the tree and all of them down again; `size` is that of the whole blob."""
        links = self.peers.links
        up, downs = links.up, links.downs
        gathered: Blobs = (blob,), (size,)
        if downs:
            blobs, sizes = [b""] * self._size, [0] * self._size
            position = self.peers.position
            blobs[position], sizes[position] = blob, size
            for down, given in self._receive(GIVE, downs, until).items():
                for far, each, each_size in zip(self._below[down], *given, strict=True):
                    blobs[far], sizes[far] = each, each_size
            gathered = blobs, sizes
            if len(self._subtree) < self._size:  # the root has all blobs, in order
                gathered = (
                    [blobs[position] for position in self._subtree],
                    [sizes[position] for position in self._subtree],
                )
        if up is not None:
            self._send(GIVE, up, join_blobs(*gathered), until)
            gathered = self._receive(ALL, (up,), until)[up]
        if downs:
            body = join_blobs(*gathered)
            for down in downs:
                self._send(ALL, down, body, until)
        return gathered

    def _receive(self, kind: int, positions: tuple[int, ...], until: float) -> dict[int, Blobs]:
        """Wait for one message of `kind` from each of `positions`; return their blobs."""
        got: dict[int, Blobs] = {}
        self._kind, self.peers.waits = kind, (positions, got)
        spin_until = time.monotonic() + _SPIN_S
        for position in positions:
            self._spin(position, spin_until)
        if len(got) < len(positions):
            later_s = _WARN_LATER_S if kind == ALL else 0.0  # the rank above warns first
            self._sleep(until, time.monotonic() + host_s(self.warn_after_s) + later_s)
        return got

    def _spin(self, position: int, until: float) -> None:
        """Wait for the message of one neighbour without sleeping."""
        connection, (_, got) = self._connections[position], self.peers.waits
        mailbox = connection.mailbox  # with a mailbox, the socket is read only before sleeping
        take = connection.take if mailbox is None else mailbox.take
        arena = self.arena
        looks, give_way = (0, os.sched_yield) if arena is None else (arena.looks, arena.give_way)
        try:
            while position not in got:
                frame = take()
                if frame is not None:
                    self._accept(frame, position)
                elif looks:
                    looks -= 1
                elif time.monotonic() > until:
                    break
                else:
                    give_way()  # the awaited rank may need this core
        except (ConnectionClosed, ValueError) as closed:
            raise self.peers.fail_gone(position, str(closed)) from None

    def _sleep(self, until: float, warn_at: float) -> None:
        """Wait asleep until all messages have arrived; neighbours wake this rank."""
        kind, peers = self._kind, self.peers
        positions, got = peers.waits
        wait_s = _FIRST_SLEEP_S
        suspect_at, has_grace = time.monotonic() + _SUSPECT_S, kind == ALL
        for position in positions:
            self._connections[position].sleep(True)
        self._take_all()  # frames that were sent before the senders saw that this rank sleeps
        while len(got) < len(positions):
            now = time.monotonic()
            if now >= until:
                states = peers.ask()
                self._take_all()  # a rank that answered may have given up first
                if len(got) == len(positions):
                    break
                is_there = bool(states) and all(s.seq >= peers.seq for s in states.values())
                if not (has_grace and is_there):
                    raise peers.fail_late(states)
                # The rank above is in this round, and knows better which ranks are missing.
                has_grace, until = False, time.monotonic() + _GRACE_S
            if kind == ALL and self._ended and now >= suspect_at:
                suspect_at = now + _SUSPECT_S
                state = peers.ask().get(positions[0])
                # The rank above hasn't begun this round yet, so the ended rank has left within it.
                if state is not None and state.seq < peers.seq:
                    raise peers.fail_gone(self._ended[0])
            if now >= warn_at:
                warn_at = _NEVER
                peers.warn()
            ends = (until, warn_at, suspect_at if self._ended else _NEVER)
            events = self._poll.poll(max(0.0, min(min(ends) - now, wait_s)) * 1000)
            for fd, _ in events:
                self._on_event(fd)
            if not events:
                wait_s = LONGEST_WAIT_S  # by now all senders see that this rank sleeps
                self._take_all()
        for position in positions:
            self._connections[position].sleep(False)

    def _take_all(self) -> None:
        """Process messages that arrived while this rank was busy or going to sleep."""
        positions, got = self.peers.waits
        for position in positions:
            if position not in got:
                self._take(position)

    def _on_event(self, fd: int) -> None:
        """Process a readable connection, or the pidfd of a process that has ended."""
        position = self._position_of[fd]
        if position in self._connections:
            self._take(position, is_gone=fd != self._connections[position].fd)  # a pidfd
        else:
            self._poll.unregister(fd)  # it stays readable, and would end every later wait
            self._ended.append(position)

    def _take(self, position: int, is_gone: bool = False) -> None:
        """Process a neighbour's frames; raise if it is gone or has sent an invalid frame."""
        how = ""
        try:
            # If the rank is gone, take all its frames: a report may follow the awaited one.
            while (frame := self._connections[position].take()) is not None:
                if self._accept(frame, position) and not is_gone:
                    return
        except (ConnectionClosed, ValueError) as closed:
            is_gone, how = True, str(closed)
        # A peer that sent GIVE still waits for ALL, so its exit is a failure; one that sent ALL
        # may exit.
        if is_gone and not (self._kind == ALL and position in self.peers.waits[1]):
            raise self.peers.fail_gone(position, how)

    def _accept(self, frame: Frame, position: int) -> bool:
        """Process one frame of a neighbour; return whether it is the awaited one."""
        kind, seq, body = frame
        if kind == NOTICE:
            downs = self.peers.links.downs
            self.peers.forward_warning(body, [down for down in downs if down != position])
            return False
        if kind == FAIL:
            raise self.peers.fail(read_failure(body), position)
        positions, got = self.peers.waits
        is_awaited = (kind, seq) == (self._kind, self.peers.seq) and position in positions
        if not is_awaited or position in got:  # its callers then count the rank as gone
            raise ConnectionClosed(f"it sent frame {kind} of round {seq}")
        count = self._size if kind == ALL else len(self._below[position])
        got[position] = split_blobs(body, count, self.inline_bytes)
        return True

    def _send(self, kind: int, position: int, body: bytes, until: float) -> None:
        """Send a frame of this round to a neighbour; raise if that fails."""
        try:
            self._connections[position].send(kind, self.peers.seq, body, until)
        except ConnectionClosed as closed:
            self.peers.waits = (), {}  # no frame of a round counts any more
            self._take(position)  # the neighbour may have reported why
            raise self.peers.fail_gone(position, str(closed)) from None
        except TimeoutError:
            raise self.peers.fail_blocked(position) from None
