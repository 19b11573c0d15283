"""One rank's part of a group's control plane: rounds, each an all-gather of blobs.

A round has two states. GIVE: a rank waits for the blobs of all ranks below it, and passes them up
with its own; a leader without a rank above passes them to the leaders across. ALL: it waits for the
blobs of all ranks from above, or for those of each leader across. Then it passes all of them down,
and the round is over. A rank without a rank below it begins with ALL, a root without one across
ends with GIVE. A failure, or the deadline, ends every later round as well.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from struct import Struct

from unisono.control.connection import (
    ALL,
    FAIL,
    GIVE,
    NOTICE,
    START_BYTES,
    Blobs,
    ConnectionClosed,
    Frame,
    read_failure,
    split_blobs,
)
from unisono.control.handshake import LONGEST_WAIT_S
from unisono.control.peers import NOTHING, Peers
from unisono.control.signatures import describe
from unisono.deadlines import end_of_call, host_s
from unisono.errors import CollectiveError
from unisono.host.arena import Arena

_SPIN_S = 200e-6  # longer than a wake-up takes, or one slow round would make the next one slow
# The rank above knows more about missing ranks, so it has time to warn or raise first. Of ranks
# across, the first one that waits warns for all.
_WARN_LATER_S, _WARN_IN_TURN_S = 3.0, 0.5
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
        self._lay_out_bodies()
        self._connections = peers.rounds
        across = [peers.rounds[other] for other in peers.links.across]
        for each in across:
            each.beside = across
        self._kind = NOTICE  # of no round: nothing is awaited yet
        self._timeout_s: float | None = None
        self._until: float | None = None  # of this round, once it waits
        self._poll = select.poll()
        self._position_of = {each.fd: other for other, each in self._connections.items()}
        self._position_of |= {fd: other for other, fd in peers.pidfds.items()}
        self._early: dict[int, Frame] = {}  # by rank: received before they were waited for
        self._gone: dict[int, str] = {}  # ranks that may have left after the round, and how
        for fd in self._position_of:
            self._poll.register(fd, select.POLLIN)

    def _lay_out_bodies(self) -> None:
        """Set where blobs are in the bodies of messages, and who gets which message."""
        peers = self.peers
        links, position = peers.links, peers.position
        # Sorted, as bodies hold blobs by position, while `links.behind` begins with the neighbour.
        behind = {near: sorted(fars) for near, fars in links.behind.items()}
        own = sorted((position, *(far for down in links.downs for far in behind[down])))
        index = {position: index for index, position in enumerate(own)}
        self._count, self._index = len(own), index[position]
        self._below = {down: [index[far] for far in behind[down]] for down in links.downs}
        self._beside = {position: own} | {other: behind[other] for other in links.across}
        # The sizes in a body: of this subtree's blobs, of all, and of those from each neighbour.
        self._own_head, self._whole_head = Struct(f"<{len(own)}Q"), Struct(f"<{len(peers.ranks)}Q")
        self._heads = {near: Struct(f"<{len(fars)}Q") for near, fars in behind.items()}
        self._onward, self._passes = links.across, ALL
        """The ranks that get this subtree's blobs, and in a message of which kind."""
        self._warn_later_s = _WARN_IN_TURN_S * sum(other < position for other in links.across)
        if links.up is not None:
            self._heads[links.up] = self._whole_head
            self._onward, self._passes, self._warn_later_s = (links.up,), GIVE, _WARN_LATER_S

    def exchange(self, blob: bytes, timeout_s: float | None) -> Blobs:
        """Return the blobs of all ranks in order of positions. Collective over the group."""
        peers, size = self.peers, len(blob)
        given = blob if size <= self.inline_bytes else blob[:START_BYTES]  # enough to name the call
        try:  # an interrupt may come just after the acquire: the lock knows its owner
            until = None
            if not peers.lock.acquire(False):
                until = end_of_call(timeout_s)
                peers.wait_for_turn(blob, until)
            if peers.failure is not None or peers.is_in_round or peers.flooded is not None:
                peers.refuse(given)
            self._timeout_s, self._until = timeout_s, until
            peers.seq += 1
            peers.blob, peers.thread_id, peers.is_in_round = given, threading.get_ident(), True
            peers.steps.last = ""  # reports on this rank name the round from now on
            try:
                return self._round(given, size)
            finally:
                peers.waits, peers.is_in_round = NOTHING, False
                if peers.failure is not None or peers.concurrent_calls:
                    peers.leave_failed()
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

    def _round(self, blob: bytes, size: int) -> Blobs:
        """Gather the blobs of all ranks; `size` is that of this rank's whole blob."""
        peers, connections = self.peers, self._connections
        up, downs, onward = peers.links.up, peers.links.downs, self._onward
        blobs, sizes = [b""] * self._count, [0] * self._count
        blobs[self._index], sizes[self._index] = blob, size
        if downs:
            for down, (given, given_sizes) in self._receive(GIVE, downs).items():
                for source, index in enumerate(self._below[down]):
                    blobs[index], sizes[index] = given[source], given_sizes[source]
        gathered: Blobs = blobs, sizes
        if onward:
            body = b"".join((self._own_head.pack(*sizes), *blobs))
            for other in onward:
                mailbox = connections[other].mailbox
                if mailbox is None or not mailbox.put(self._passes, peers.seq, body):
                    self._send(self._passes, other, body)
            parts = self._receive(ALL, onward)
            gathered = self._joined(gathered, parts) if up is None else parts[up]
        if downs:
            body = b"".join((self._whole_head.pack(*gathered[1]), *gathered[0]))
            for down in downs:
                mailbox = connections[down].mailbox
                if mailbox is None or not mailbox.put(ALL, peers.seq, body):
                    self._send(ALL, down, body)
        return gathered

    def _joined(self, own: Blobs, parts: dict[int, Blobs]) -> Blobs:
        """Return the blobs of all ranks from those of this subtree and of the ranks across."""
        size = len(self.peers.ranks)
        blobs, sizes = [b""] * size, [0] * size
        for source, (given, given_sizes) in {self.peers.position: own, **parts}.items():
            for index, position in enumerate(self._beside[source]):
                blobs[position], sizes[position] = given[index], given_sizes[index]
        return blobs, sizes

    def _deadline(self) -> float:
        """Return the deadline of this round: it counts from the first wait."""
        if self._until is None:
            self._until = end_of_call(self._timeout_s)
        return self._until

    def _receive(self, kind: int, positions: tuple[int, ...]) -> dict[int, Blobs]:
        """Wait for one message of `kind` from each of `positions`; return their blobs."""
        got: dict[int, Blobs] = {}
        self._kind, self.peers.waits = kind, (positions, got)
        arena, seq = self.arena, self.peers.seq
        looks, give_way = (0, os.sched_yield) if arena is None else (arena.looks, arena.give_way)
        spin_until = time.monotonic() + _SPIN_S
        for position in positions:
            connection, looks_left = self._connections[position], looks
            mailbox = connection.mailbox  # with a mailbox, the socket is read only before sleeping
            take = connection.take if mailbox is None else mailbox.take
            try:
                if position in self._early:
                    self._accept(self._early.pop(position), position)
                while position not in got:
                    frame = take()
                    if frame is not None and frame[0] == kind and frame[1] == seq:
                        head = self._heads[position]
                        got[position] = split_blobs(frame[2], head, self.inline_bytes)
                    elif frame is not None:
                        self._accept(frame, position)
                    elif looks_left:
                        looks_left -= 1
                    elif time.monotonic() > spin_until:
                        break
                    else:
                        give_way()  # the awaited rank may need this core
            except (ConnectionClosed, ValueError) as closed:
                raise self.peers.fail_gone(position, str(closed)) from None
        if len(got) < len(positions):
            for position, how in self._gone.items():
                if position in self._connections:  # it left after an earlier round
                    raise self.peers.fail_gone(position, how)
            self._sleep()
        return got

    def _sleep(self) -> None:
        """Wait asleep until all messages have arrived; neighbours wake this rank."""
        kind, peers, until = self._kind, self.peers, self._deadline()
        positions, got = peers.waits
        wait_s, has_grace = _FIRST_SLEEP_S, kind == ALL
        warn_at = time.monotonic() + host_s(self.warn_after_s)
        warn_at += self._warn_later_s if kind == ALL else 0.0
        suspect_at = time.monotonic() + _SUSPECT_S
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
            if kind == ALL and self._gone and now >= suspect_at:
                suspect_at = now + _SUSPECT_S
                # A rank that hasn't begun this round yet has let no other one end it.
                if any(state.seq < peers.seq for state in peers.ask().values()):
                    raise peers.fail_gone(*next(iter(self._gone.items())))
            if now >= warn_at:
                warn_at = _NEVER
                peers.warn()
            ends = (until, warn_at, suspect_at if self._gone else _NEVER)
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
            self._unwatch(fd, position, "")

    def _unwatch(self, fd: int, position: int, how: str) -> None:
        """Record a rank that is gone; its descriptor stays readable, and would end every wait."""
        self._poll.unregister(fd)
        self._gone[position] = how

    def _take(self, position: int, is_gone: bool = False) -> None:
        """Process a neighbour's frames; raise if it is gone or has sent an invalid frame."""
        connection, how = self._connections[position], ""
        try:
            # If the rank is gone, take all its frames: a report may follow the awaited one.
            while (frame := connection.take()) is not None:
                if self._accept(frame, position) and not is_gone:
                    return
        except (ConnectionClosed, ValueError) as closed:
            is_gone, how = True, str(closed)
        if not is_gone:
            return
        # A peer that sent GIVE still waits for ALL, so its exit is a failure; one that sent ALL
        # may exit.
        if not (self._kind == ALL and position in self.peers.waits[1]):
            raise self.peers.fail_gone(position, how)
        if position in self._beside:  # the wait for the other ranks across goes on
            self._unwatch(connection.fd, position, how)

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
        if not is_awaited or position in got:
            self._keep(frame, position)
            return False
        got[position] = split_blobs(body, self._heads[position], self.inline_bytes)
        return True

    def _keep(self, frame: Frame, position: int) -> None:
        """Keep a frame that comes early: a rank across doesn't wait for this one's neighbours."""
        kind, seq, _ = frame
        next_seq = self.peers.seq + (position in self.peers.waits[1])
        is_wrong = position not in self._beside or position in self._early
        if (kind, seq) != (ALL, next_seq) or is_wrong:  # the callers then count the rank as gone
            raise ConnectionClosed(f"it sent frame {kind} of round {seq}")
        self._early[position] = frame

    def _send(self, kind: int, position: int, body: bytes) -> None:
        """Send a neighbour a frame of this round where its mailbox isn't enough, or raise."""
        try:
            connection, until = self._connections[position], self._deadline()
            self.peers.waits = (position,), {}
            connection.finish(kind, self.peers.seq, body, until)
        except ConnectionClosed as closed:
            self.peers.waits = (), {}  # no frame of a round counts any more
            self._take(position)  # the neighbour may have reported why
            raise self.peers.fail_gone(position, str(closed)) from None
        except TimeoutError:
            raise self.peers.fail_blocked(position) from None
