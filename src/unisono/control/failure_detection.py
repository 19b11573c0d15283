"""Failure detection: which ranks of a group are gone or late, and how all others learn it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NoReturn

from unisono.control import signatures
from unisono.control.connection import (
    FAIL,
    NOTICE,
    Connection,
    ConnectionClosed,
    FailureReport,
    read_failure,
)
from unisono.control.envelopes import Blobs
from unisono.control.missing import (
    Absent,
    Farewell,
    Missing,
    has_ended,
    is_stopped,
    open_pidfds,
    report,
)
from unisono.control.sideband import Sideband, State, stack_of
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import Peers
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError
from unisono.tracebacks import hides

__tracebackhide__ = hides

_log = logging.getLogger(__name__)
_LAST_WORD_S = 0.1  # where several ranks have ended: one may have said why on the sideband
_LATE_S = 0.3  # for the report of a rank that knows more
_MOST_ASKED = 64


class FailureDetector:
    """What one rank knows of ranks that are gone or late."""

    # The group, as this rank sees it; `failure` is set once and stays:
    #   idle --enter--> in a round --leave--> idle
    #   idle or in a round --a peer is gone, FAIL comes--> failed
    #   in a round --the deadline, a peer that doesn't read, a second thread--> failed
    #   in a round --Ctrl-C--> failed, and out of step
    # On the way to failed it tells the others: FAIL to its neighbours, on the connection of the
    # rounds and on the sideband, which floods it. In failed every round raises the same again.
    #
    # A peer:
    #   there --its pidfd is readable, its connection closes--> ended
    #   ended, its farewell covers the step that this rank waits for --> done: nothing fails
    #   ended otherwise --> gone: the group has failed
    #   ended, and the rank between has left as well --> unknown: the backend notices

    def __init__(
        self, ranks: tuple[int, ...] | range, place: int, peers: Peers, steps: SequenceNumbers
    ) -> None:
        self._ranks = ranks
        self._place = place
        self._links = peers.links
        self._connections = peers.connections
        self._pids = peers.pids
        self._steps = steps
        self.pidfds: Mapping[int, int] = open_pidfds(peers.pids)
        """For each place of this host, what becomes readable when its process ends."""
        self.failure: CollectiveError | None = None
        self.gone: Absent | None = None
        self.waits: tuple[tuple[int, ...], Mapping[int, Blobs]] | None = None
        """The places that this rank waits for in its round, and what came; None outside a wait."""
        self._seq, self._blob, self._is_in_round = 0, b"", False
        self._thread_id = threading.get_ident()
        self._has_warned = False
        self._concurrent_calls = ""
        self._unsent_failure = b""  # an interrupt's, while another thread may be sending
        state = _state_reader(weakref.ref(self))
        same_host = peers.pids.keys()
        self._sideband = Sideband(
            place, peers.links, peers.sidebands, same_host, state, peers.seats
        )
        self._close = weakref.finalize(
            self,
            _close,
            self._sideband,
            list(self._connections.values()),
            list(self.pidfds.values()),
        )
        self._close.atexit = False

    def close(self) -> None:
        """Close all connections; harmless the second time."""
        self._close()

    def disown(self) -> None:
        """Close what a forked child has inherited; its parent goes on with it."""
        if self._close.detach() is None:
            return
        self._sideband.disown()
        for connection in self._connections.values():
            connection.close()
        for fd in self.pidfds.values():
            os.close(fd)

    def say_farewell(self, how: str) -> None:
        """Let the others know that this rank leaves in good order."""
        if self.failure is not None or self._is_in_round or not self._close.alive:
            return
        call = signatures.describe(self._blob) if self._seq else ""
        if call.startswith(signatures.UNKNOWN):
            call = ""
        text = f"{how} after {call or 'its last collective'}"
        if not self._seq:
            text = f"{how} before its first collective"
        self._sideband.send_farewell(Farewell(text, dict(self._steps.counts)))

    def enter(self, seq: int, blob: bytes) -> None:
        """Take note of the round that this thread begins, and of what it gives."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        self._seq, self._blob, self._is_in_round = seq, blob, True
        self._thread_id = threading.get_ident()
        self._has_warned = False
        self._steps.last = ""

    def leave(self) -> None:
        """Take note that the round is over, whether it failed or not."""
        self.waits, self._is_in_round = None, False
        if self._unsent_failure:
            self._send_failure(self._unsent_failure)
        if self._concurrent_calls and self.failure is None:
            self.raise_failure(FailureReport("threads", self._concurrent_calls))

    def state(self, group: str) -> State:
        """Say where this rank is, and how far in the group of that name."""
        waits_for = None
        if self.waits is not None:
            places, got = self.waits
            waits_for = [place for place in places if place not in got]
        last = self._steps.last or (signatures.describe(self._blob) if self._seq else "")
        last = "" if last.startswith(signatures.UNKNOWN) else last
        step = self._steps.counts.get(group, 0)
        return State(stack_of(self._thread_id), last, self._seq, waits_for, step)

    def raise_if_gone(
        self, among: Collection[int] | None = None, group: str = "", step: int = 0
    ) -> None:
        """Raise if a rank is gone; frames of rounds stay where they are."""
        # A reported failure comes first: some ranks may have left because of it.
        counts = [place for place in self.pidfds if among is None or place in among]
        ended = [place for place in counts if has_ended(self.pidfds[place])]
        ended = [place for place in ended if not self._is_done(place, group, step)]
        body = self._sideband.failure(_LAST_WORD_S if len(ended) > 1 else 0.0)
        if body is not None:
            failure = read_failure(body)
            if among is None or ended or failure.rank in [self._ranks[at] for at in among]:
                self.raise_failure(failure)
        if ended:
            self.raise_gone(ended[0])
        for place, connection in self._connections.items():
            is_closed = (among is None or place in among) and connection.is_closed()
            if is_closed and not self._is_done(place, group, step):
                self.raise_gone(place, "it closed the connection")

    def _is_done(self, place: int, group: str, step: int) -> bool:
        """Return whether a rank that is gone isn't needed, as far as it can be known."""
        farewell = self._sideband.farewell(place)
        if farewell is not None:
            return farewell.has_done(group, step)
        # Nothing can be known of it: if it died, the backend tells its neighbours.
        return step > 0 and self._sideband.is_cut_off(place)

    def late(self, places: Iterable[int], group: str, step: int, is_over: bool) -> str:
        """Say which ranks haven't come to an operation of the data plane."""
        # Local; waits a second at most.
        asked = [place for place in places if place != self._place][:_MOST_ASKED]
        states = self._ask(asked, group)
        reported = self._sideband.late(group, step)
        if reported:
            return reported
        absent = [p for p in asked if p in states and states[p].step < step]
        silent = [p for p in asked if p not in states]
        absent += [p for p in silent if self._sideband.next_hop(p) in (p, *states)]
        if not absent:
            if is_over:
                reported = self._sideband.late(group, step, _LATE_S)
            absent = silent
        text = reported or "\n".join(str(self._missing(place, states)) for place in absent)
        if text and is_over:
            self._sideband.broadcast_late(group, step, text)
        return text

    def forward_warning(self, body: bytes, source: int) -> None:
        """Log a neighbour's warning of a long wait, and pass it down the tree."""
        self._has_warned = True
        _log.warning("%s", body.decode("utf-8", "replace"))
        self._notify([place for place in self._links.downs if place != source], body)

    def warn(self, places: tuple[int, ...], got: Mapping[int, Blobs]) -> None:
        """Warn which of `places` are missing, unless a neighbour did; once a round."""
        if self._has_warned:
            return
        missing = self._report(places, got, self.ask(places, got))
        text = f"{self._me()} is still waiting: {missing}"
        _log.warning("%s", text)
        self._notify(list(got), text.encode("utf-8", "backslashreplace"))

    def _notify(self, places: list[int], body: bytes) -> None:
        for place in places:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                self._connections[place].send(NOTICE, self._seq, body, time.monotonic() + 1)

    def interrupt(self, how: str, is_alone: bool) -> None:
        """Take note that this rank left a collective half-way, and tell all others."""
        # Nobody knows what the others have of it, so what this rank calls next is refused, and
        # those that wait for it learn that it won't come.
        rank = self._ranks[self._place]
        report = FailureReport("peer", f"rank {rank} was interrupted: {how}", rank)
        error = CollectiveError(
            f"{self._me()}: {how}, so the ranks are out of step: end the job, or finalize() "
            "and initialize again"
        )
        self._fail(error, report, is_alone)

    def give_up(self, text: str, is_alone: bool) -> None:
        """Record that an operation of the data plane is overdue, and tell all others."""
        self._fail(CollectiveTimeoutError(text), FailureReport("timeout", text), is_alone)

    def _fail(self, error: CollectiveError, report: FailureReport, is_alone: bool) -> None:
        body = report.encode()
        if self.failure is None:
            self.failure, self._unsent_failure = error, body
        self._sideband.broadcast_failure(body)
        if is_alone and self._unsent_failure:
            self._send_failure(self._unsent_failure)

    def _send_failure(self, body: bytes, source: int | None = None) -> None:
        self._unsent_failure = b""
        for place, connection in self._connections.items():
            if place != source:
                with contextlib.suppress(ConnectionClosed, TimeoutError):
                    connection.send(FAIL, self._seq, body, time.monotonic() + 1)

    def raise_not_begun(self, blob: bytes) -> NoReturn:
        """Raise because the group's lock wasn't free before the deadline."""
        raise CollectiveTimeoutError(
            f"{self._me()}: {signatures.describe(blob)} wasn't begun before its deadline: another "
            "thread is looking for ranks that are gone"
        )

    def raise_nested(self, blob: bytes) -> NoReturn:
        """Raise because the round is within another one of the same thread."""
        raise CollectiveError(
            f"{self._me()}: {signatures.describe(blob)} was called within "
            f"{signatures.describe(self._blob)}, by a signal handler or a "
            "finalizer: let those call no collective"
        )

    def raise_if_concurrent(self, thread_id: int, blob: bytes) -> None:
        """Raise if another thread is inside a round."""
        if not thread_id or thread_id == threading.get_ident():
            return
        self._concurrent_calls = (
            f"two threads called collectives of one group at once, {signatures.describe(blob)} and "
            f"{signatures.describe(self._blob)}: let one thread make them all, or use "
            "async_op=True, or make a group for each thread with new_group"
        )
        raise CollectiveError(f"{self._me()}: {self._concurrent_calls}")

    def raise_gone(self, place: int, how: str = "") -> NoReturn:
        """Fail because of a rank that is gone."""
        rank, pid = self._ranks[place], self._pids.get(place)
        who = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid} on this host)"
        ended = pid is not None and place in self.pidfds and has_ended(self.pidfds[place])
        text = f"{who} has ended" if ended else f"{who} is gone: {how}"
        farewell = self._sideband.farewell(place)
        if farewell is not None:
            text = f"{who} {farewell.how}"
        self.raise_failure(FailureReport("peer", text, rank))

    def ask(self, places: tuple[int, ...], got: Mapping[int, Blobs]) -> dict[int, State]:
        """Ask the ranks of `places` that haven't come for their state; 0.4 s at most."""
        return self._ask([place for place in places if place not in got])

    def is_behind(self, place: int) -> bool:
        """Return whether a neighbour hasn't begun this round; asks it."""
        state = self._ask([place]).get(place)
        return state is not None and state.seq < self._seq

    def raise_timeout(
        self, places: tuple[int, ...], got: Mapping[int, Blobs], states: dict[int, State]
    ) -> NoReturn:
        """Fail because some of `places` didn't come, given what `ask` found."""
        self.raise_failure(FailureReport("timeout", self._report(places, got, states)))

    def raise_blocked(self, place: int) -> NoReturn:
        """Fail because a neighbour doesn't read what it is sent."""
        late = Missing(self._ranks[place], pid=self._pids.get(place))
        text = f"{late}\n  it hasn't read what it was sent"
        self.raise_failure(FailureReport("timeout", text))

    def raise_failure(self, failure: FailureReport, source: int | None = None) -> NoReturn:
        """Tell all neighbours but the one that it came from, then raise."""
        body = failure.encode()
        self._sideband.broadcast_failure(body)
        self._send_failure(body, source)
        where = f", in {signatures.describe(self._blob)}" if self._is_in_round else ""
        text = f"{self._me()}{where}: {failure.text}"
        if failure.kind == "timeout":
            text = f"{failure.text}\n  the deadline was over on {self._me()}{where}"
        if failure.kind == "peer":
            self.gone = Absent(failure.rank, failure.text)
            self.failure = PeerFailedError(text, failure.rank)
        else:
            kind = CollectiveTimeoutError if failure.kind == "timeout" else CollectiveError
            self.failure = kind(text)
        raise self.failure

    def _me(self) -> str:
        return f"rank {self._ranks[self._place]} of {len(self._ranks)}"

    def _ask(self, places: Iterable[int], group: str = "") -> dict[int, State]:
        """Ask ranks for their state, but for those that are stopped."""
        return self._sideband.ask([p for p in places if not is_stopped(self._pids.get(p))], group)

    def _missing(self, place: int, states: Mapping[int, State]) -> Missing:
        state = states.get(place, State())
        behind = () if place in states else self._links.below.get(place, ())[1:]
        rank, pid = self._ranks[place], self._pids.get(place)
        return Missing(rank, [self._ranks[far] for far in behind], pid, state.stack, state.last)

    def _report(
        self, places: tuple[int, ...], got: Mapping[int, Blobs], states: dict[int, State]
    ) -> str:
        """Say which ranks have come with which call, and where the others are."""
        absent = [place for place in places if place not in got]
        came = {self._place: self._blob}
        for source, (blobs, _) in got.items():
            came |= zip(sorted(self._links.below.get(source, ())), blobs, strict=False)
        by_rank = {self._ranks[place]: signatures.describe(blob) for place, blob in came.items()}
        missing = []
        for place in absent:
            state = states.get(place, State())
            if state.seq < self._seq:
                missing.append(self._missing(place, states))
                continue
            # It has come, and waits for others itself.
            by_rank[self._ranks[place]] = state.last or signatures.UNKNOWN
            further = [far for far in state.waits_for or () if 0 <= far < len(self._ranks)]
            states |= self._ask(further)
            missing += [self._missing(far, states) for far in further]
        return report(signatures.name(self._blob), by_rank, missing)


def _state_reader(reference: weakref.ref[FailureDetector]) -> Callable[[str], State]:
    """Return what the sideband's thread calls, which must not keep the detector alive."""

    def state(group: str) -> State:
        detector = reference()
        return State() if detector is None else detector.state(group)

    return state


def _close(sideband: Sideband, connections: list[Connection], pidfds: list[int]) -> None:
    sideband.close()
    for connection in connections:
        connection.close()
    for fd in pidfds:
        os.close(fd)
