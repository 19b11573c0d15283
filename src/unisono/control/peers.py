"""The peers of a group: detection of gone and late ranks, and reports of them to all ranks.

A rank has two connections to each neighbour in the tree. `hub` uses one of them for rounds. The
other is the sideband: a thread serves it while the rank's own thread computes, or waits in a
collective. The bodies of sideband frames are JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from unisono.control import signatures
from unisono.control.absent_ranks import SIDEBAND, Absent, Missing, is_stopped, report, stack_of
from unisono.control.condition import Condition
from unisono.control.connection import (
    ANSWER,
    ASK,
    FAIL,
    LATE,
    LEAVE,
    NOTICE,
    Blobs,
    Connection,
    ConnectionClosed,
    FailureReport,
    read_failure,
)
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import Links
from unisono.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

_log = logging.getLogger(__name__)
_SEND_S = 1.0
_ASK_S = 0.4  # short: a rank stuck in C never answers, and the caller is past its deadline
_REPORT_S = 0.1  # for the report of one of several ranks that have ended
_LATE_S = 0.3  # for the report of a rank that knows more
_DEPARTURE_S = 1.0  # for the report of a rank that has left, or the end of its connection
_MAX_ASKED = 64
NOTHING: tuple[tuple[int, ...], dict[int, Blobs]] = (), {}


@dataclass(frozen=True, slots=True)
class State:
    """A rank's progress: its stack, last call, round, awaited positions, and step of a group."""

    stack: str = ""
    last: str = ""
    seq: int = 0
    waits_for: Sequence[int] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank's report that it leaves in good order, with its operations begun in each group."""

    how: str
    steps: Mapping[str, int]


class Peers:
    """The other ranks of one group, as this rank knows them."""

    # The group, as this rank sees it; the first `failure` stays:
    #   idle --a round begins--> in a round --it ends--> idle
    #   idle or in a round --a peer is gone, FAIL arrives--> failed
    #   in a round --the deadline, a peer that doesn't read, a second thread--> failed
    #   in a round --Ctrl-C--> failed, and out of step
    # On the way to failed the rank sends FAIL to its neighbours, on the connections of the rounds
    # and on the sideband, which floods it. In failed every round raises the same error again.
    #
    # A neighbour:
    #   connected --LEAVE--> left in good order
    #   connected --its connection closes, its pidfd is readable--> gone without a report
    # Another rank:
    #   connected --LEAVE, forwarded--> left in good order, or gone without a report
    #   connected --the neighbour towards it has left--> cut off: the backend notices its death
    # A rank that left after its part in the step that this rank waits for isn't missed.
    #
    # Frames of the sideband:
    #   ASK, ANSWER   name a rank, which handles them; the others forward them one hop towards it
    #   FAIL, LATE    are flooded: a rank keeps the first, and sends it to its other neighbours
    #   LEAVE         is kept; if it came from a rank of this host, neighbours here receive it, too
    # The thread serves until `close` writes to its pipe; then it closes the connections.

    def __init__(
        self,
        ranks: tuple[int, ...] | range,
        position: int,
        links: Links,
        connections: tuple[Mapping[int, Connection], Mapping[int, Connection]],
        pids: Mapping[int, int],
        steps: SequenceNumbers,
    ) -> None:
        self.ranks: tuple[int, ...] | range = ranks
        self.position: int = position
        self.links: Links = links
        self.rounds: Mapping[int, Connection] = connections[0]
        for connection in self.rounds.values():
            connection.is_failed = lambda: self.flooded is not None
        self.sideband: Mapping[int, Connection] = connections[1]
        self.pids: Mapping[int, int] = pids
        self.pidfds: Mapping[int, int] = _open_pidfds(pids)
        """By position, for ranks of this host: a descriptor readable once the process has ended."""
        self.lock: Any = threading.RLock()
        """Held in a round, and while another thread uses the connections of the rounds."""
        self.failure: CollectiveError | None = None
        """The error of every later round. Each raises a copy, as the traceback of this error would
        keep the user's frames alive."""
        self.seq: int = 0
        """Number of the round that this rank is in, or was in last."""
        self.is_in_round: bool = False
        self.waits: tuple[tuple[int, ...], dict[int, Blobs]] = NOTHING
        """Positions of the ranks that this one waits for in its round, and their blobs."""
        self.blob: bytes = b""
        """This rank's blob in that round."""
        self.thread_id: int = threading.get_ident()
        """The thread that makes, or made, that round."""
        self.steps: SequenceNumbers = steps
        self._absent: Absent | None = None
        self._warned_of = 0  # the last round that a rank has warned of
        self.concurrent_calls: str = ""
        """Set by `wait_for_turn` in a rejected thread; the round's own thread then fails."""
        self._unsent: tuple[bytes, int | None] | None = None  # where another thread may be sending
        self._next_hops = {far: down for down, fars in links.behind.items() for far in fars}
        self._departures: dict[int, Departure | None] = {}  # None: gone without a report
        self._answers: dict[int, State] = {}  # by position: to this rank's last ASK
        self.flooded: bytes | None = None
        """Body of the first FAIL, sent or received."""
        self._late: dict[str, tuple[int, str]] = {}  # by group: step and text of the last report
        self._condition = Condition()
        self._wake_reader, self._wake_writer = os.pipe()
        self._is_open = True
        threading.Thread(target=self._serve, name=SIDEBAND, daemon=True).start()

    def __str__(self) -> str:
        return f"rank {self.ranks[self.position]} of {len(self.ranks)}"

    def close(self, how: str = "") -> None:
        """Close all connections, once; with `how`, report an orderly departure first."""
        if how:
            self.report_departure(how)
        if not self._is_open:
            return
        self._is_open = False
        os.write(self._wake_writer, b"!")  # a forked child may keep the pipe open
        os.close(self._wake_writer)
        self._close_rounds()

    def disown(self) -> None:
        """Close the inherited connections in a forked child; the parent keeps its own."""
        if not self._is_open:
            return
        self._is_open = False
        os.close(self._wake_writer)
        os.close(self._wake_reader)
        for connection in self.sideband.values():  # a fork has no thread that closes them
            connection.close()
        self._close_rounds()

    def _close_rounds(self) -> None:
        for connection in self.rounds.values():
            connection.close()
        for fd in self.pidfds.values():
            os.close(fd)

    def report_departure(self, how: str) -> None:
        """Report this rank's orderly departure to all others."""
        # A departure after a failure, or within a round, isn't orderly.
        if self.failure is not None or self.is_in_round or not self._is_open:
            return
        text = f"{how} after {self._call() or 'its last collective'}"
        if not self.seq:
            text = f"{how} before its first collective"
        departure = Departure(text, dict(self.steps.counts))
        self._flood(LEAVE, _encode_departure(self.position, departure))

    def refuse(self, blob: bytes) -> NoReturn:
        """Raise in place of a round with `blob`: the group has failed, or is in a round."""
        self.raise_failure()
        if self.flooded is not None and not self.is_in_round:  # the others have failed without it
            raise self.fail(read_failure(self.flooded))
        # The lock lets its owner in again, so this thread is in a round already.
        raise CollectiveError(
            f"{self}: {signatures.describe(blob)} was called within "
            f"{signatures.describe(self.blob)}: signal handlers and finalizers "
            "must not call collectives"
        )

    def leave_failed(self) -> None:
        """Report a failure of this thread's round, or of a call that another thread made in it."""
        self._send_failure()
        # `wait_for_turn` has rejected another thread's call, so the ranks are out of step.
        if self.concurrent_calls and self.failure is None:
            raise self.fail(FailureReport("threads", self.concurrent_calls))

    def wait_for_turn(self, blob: bytes, until: float) -> None:
        """Wait for the lock; raise if another thread is in a round."""
        self.raise_failure()
        call = signatures.describe(blob)
        if self.is_in_round:
            self.concurrent_calls = (
                f"two threads called collectives of one group at once, {call} and "
                f"{signatures.describe(self.blob)}: let one thread make them all, or use "
                "async_op=True, or make a group for each thread with new_group"
            )
            raise CollectiveError(f"{self}: {self.concurrent_calls}")
        left_s = max(0.0, until - time.monotonic())
        # `until` may be infinite, which a lock doesn't accept.
        if not self.lock.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
            raise CollectiveTimeoutError(
                f"{self}: {call} wasn't begun before its deadline: another thread is looking for "
                "ranks that are gone"
            )

    def raise_failure(self) -> None:
        """Raise the group's failure, if there is one."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)

    def gone(self, ranks: Collection[int] | None, group: str, step: int) -> Absent | None:
        """Return a rank known to be gone, if any; waits 1.1 s at most for its report."""
        if self._absent is None:
            try:  # an interrupt may come just after the acquire: the lock knows its owner
                # Else another thread is in a round, or looks for absent ranks itself.
                if self.lock.acquire(blocking=False) and self.failure is None:
                    with contextlib.suppress(CollectiveError):
                        self._raise_if_gone(ranks, group, step)
                    self._send_failure()  # one that a thread without the lock has recorded
            finally:
                try:  # noqa: SIM105
                    self.lock.release()
                except RuntimeError:  # another thread holds it, or none
                    pass
        absent = self._absent
        return absent if absent is None or ranks is None or absent.rank in ranks else None

    def _raise_if_gone(self, ranks: Collection[int] | None, group: str, step: int) -> None:
        """Raise if another rank has reported a failure, or a rank that is needed is gone."""
        # A reported failure comes first: some ranks may have left because of it.
        among = self._positions(ranks)
        ended = [position for position in among if self._has_ended(position)]
        ended = [position for position in ended if not self._is_done(position, group, step)]
        # The report, if one comes, says which of several has failed and not just left after it.
        wait_s = _REPORT_S if len(ended) > 1 else 0.0
        self._condition.wait(lambda: self.flooded is not None, wait_s)
        if self.flooded is not None:
            failure = read_failure(self.flooded)
            # A failure of a rank that isn't needed counts only if needed ranks have ended.
            if ranks is None or ended or failure.rank in ranks:
                raise self.fail(failure)
        if ended:
            raise self.fail_gone(ended[0])
        for position, connection in self.rounds.items():  # `is_closed` takes no frame from them
            is_closed = position in among and connection.is_closed()
            if is_closed and not self._is_done(position, group, step):
                raise self.fail_gone(position, "it closed the connection")

    def _positions(self, ranks: Collection[int] | None) -> list[int]:
        return [
            position for position, rank in enumerate(self.ranks) if ranks is None or rank in ranks
        ]

    def _has_ended(self, position: int) -> bool:
        """Return whether the process of a rank of this host is known to have ended."""
        if position not in self.pidfds:
            return False
        readable = select.poll()
        readable.register(self.pidfds[position], select.POLLIN)
        return bool(readable.poll(0))

    def _is_done(self, position: int, group: str, step: int) -> bool:
        """Return whether a departed rank isn't needed any more, as far as is known."""
        departure = self._await_departure(position)
        # Without a number, 0, it is unknown whether the rank has done its part.
        if departure is not None:
            return 0 < step <= departure.steps.get(group, 0)
        # Its fate is unknown here: if it died, the backend reports that to its neighbours.
        return step > 0 and position not in self._departures and self._is_cut_off(position)

    def _await_departure(self, position: int) -> Departure | None:
        """Wait for the report of a rank that has left; return None if it sent none."""
        self._condition.wait(
            lambda: position in self._departures or self._is_cut_off(position), _DEPARTURE_S
        )
        return self._departures.get(position)

    def _is_cut_off(self, position: int) -> bool:
        """Return whether a rank can't be reached because the rank between has left."""
        hop = self._next_hop(position)
        return hop != position and hop in self._departures

    def late(self, ranks: Collection[int] | None, group: str, step: int, is_over: bool) -> str:
        """Return a report on ranks that haven't begun an operation; waits 1 s at most."""
        others = [position for position in self._positions(ranks) if position != self.position]
        asked = others[:_MAX_ASKED]
        states = self._ask(asked, group)
        # An earlier report goes first, so that all ranks name the same culprits.
        reported = self._reported(group, step)
        if reported:
            return reported
        absent = [
            position for position in asked if position in states and states[position].step < step
        ]
        silent = [position for position in asked if position not in states]
        # If the next rank on the way to a silent one is silent too, the silent one may be well.
        absent += [
            position for position in silent if self._next_hop(position) in (position, *states)
        ]
        if not absent:
            reported = self._reported(group, step, _LATE_S) if is_over else ""
            absent = silent
        text = reported or "\n".join(self._missing(position, states).text() for position in absent)
        if text and is_over:
            self._record_late(group, step, text)
        return text

    def _reported(self, group: str, step: int, wait_s: float = 0.0) -> str:
        """Return another rank's report on an operation, empty for none."""
        self._condition.wait(lambda: self._late.get(group, (0, ""))[0] == step, wait_s)
        known_step, text = self._late.get(group, (0, ""))
        return text if known_step == step else ""

    def _record_late(self, group: str, step: int, text: str, source: int | None = None) -> None:
        """Record the first report on an operation and send it to all other ranks."""
        with self._condition.lock:
            if self._late.get(group, (0, ""))[0] >= step:
                return  # the first report stays, and a flood ends where it is known
            self._late[group] = (step, text)
            self._condition.notify_all()
        self._flood(LATE, json.dumps({"group": group, "step": step, "text": text}).encode(), source)

    def warn(self) -> None:
        """Warn, once in a round, about the ranks that it waits for, unless a neighbour has."""
        if self._warned_of != self.seq:
            text = f"{self} is still waiting: {self._report(self.ask())}"
            arrived = {*self.waits[1], *self.links.downs}.difference(self._awaited())
            self.forward_warning(text.encode("utf-8", "backslashreplace"), arrived)

    def forward_warning(self, body: bytes, positions: Iterable[int]) -> None:
        """Log a warning about a long wait and send it to neighbours."""
        self._warned_of = self.seq
        _log.warning("%s", body.decode("utf-8", "replace"))
        for position in positions:
            with contextlib.suppress(ConnectionClosed, TimeoutError):
                self.rounds[position].send(NOTICE, 0, body, time.monotonic() + _SEND_S)

    def ask(self) -> dict[int, State]:
        """Return the states of the ranks that this round waits for, after 0.4 s at most."""
        return self._ask(self._awaited())

    def interrupt(self, how: str) -> None:
        """Record that this rank was interrupted in a collective."""
        # How far the others got with the collective is unknown, so this rank's next calls raise,
        # and the ranks that wait for this one learn that it is absent.
        rank = self.ranks[self.position]
        error = CollectiveError(
            f"{self}: {how}, so the ranks are out of step: end the job, or finalize() "
            "and initialize again"
        )
        failure = FailureReport("peer", f"rank {rank} was interrupted: {how}", rank)
        self._record_failure(error, failure)

    def give_up(self, text: str) -> None:
        """Record that an operation of the data plane is overdue."""
        self._record_failure(CollectiveTimeoutError(text), FailureReport("timeout", text))

    def _record_failure(
        self, error: CollectiveError, failure: FailureReport, source: int | None = None
    ) -> None:
        """Record a failure in any thread; the lock's holder reports it to the neighbours."""
        body = failure.encode()
        if self.failure is None:
            self.failure, self._unsent = error, (body, source)
        # Any thread may use the sideband, but only the lock's holder the rounds' connections.
        self._flood_failure(body)
        if self.lock.acquire(blocking=False):
            try:
                self._send_failure()
            finally:
                self.lock.release()

    def fail_gone(self, position: int, how: str = "") -> CollectiveError:
        """Record that a rank is gone; return the error."""
        rank, pid = self.ranks[position], self.pids.get(position)
        who = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid} on this host)"
        text = f"{who} has ended" if self._has_ended(position) else f"{who} is gone: {how}"
        departure = self._await_departure(position)
        if departure is not None:  # its own report says more than its end
            text = f"{who} {departure.how}"
        return self._fail_first(FailureReport("peer", text, rank))

    def fail_late(self, states: dict[int, State]) -> CollectiveError:
        """Record that ranks of this round are late, given states from `ask`; return the error."""
        return self._fail_first(FailureReport("timeout", self._report(states)))

    def fail_blocked(self, position: int) -> CollectiveError:
        """Record that a neighbour doesn't read its messages; return the error."""
        late = Missing(self.ranks[position], pid=self.pids.get(position))
        text = f"{late.text()}\n  it hasn't read the messages that were sent to it"
        return self._fail_first(FailureReport("timeout", text))

    def _fail_first(self, failure: FailureReport) -> CollectiveError:
        """Record the failure that another rank has reported, or else this one."""
        # A rank that has failed takes no part any more: only its report says why.
        return self.fail(failure if self.flooded is None else read_failure(self.flooded))

    def fail(self, failure: FailureReport, source: int | None = None) -> CollectiveError:
        """Record a failure, report it to all neighbours but its source, and return the error."""
        where = f", in {signatures.describe(self.blob)}" if self.is_in_round else ""
        text = f"{self}{where}: {failure.text}"
        error = CollectiveError(text)
        if failure.kind == "peer":
            error = PeerFailedError(text, failure.rank)
            self._absent = self._absent or Absent(failure.rank, failure.text)
        elif failure.kind == "timeout":
            text = f"{failure.text}\n  the deadline was over on {self}{where}"
            error = CollectiveTimeoutError(text)
        self._record_failure(error, failure, source)
        return type(error)(*error.args)  # a copy: see `failure`

    def _send_failure(self) -> None:
        """Send the failure kept by `_record_failure` on the connections of the rounds."""
        if self._unsent is None:
            return
        (body, source), self._unsent = self._unsent, None
        for position, connection in self.rounds.items():
            if position != source:  # which has sent it here
                with contextlib.suppress(ConnectionClosed, TimeoutError):
                    connection.send(FAIL, 0, body, time.monotonic() + _SEND_S)

    def _flood_failure(self, body: bytes, source: int | None = None) -> None:
        """Report a failure to all ranks, even while their own threads are in a collective."""
        with self._condition.lock:
            if self.flooded is not None:
                return  # the first report stays, and a flood ends where it is known
            self.flooded = body
            self._condition.notify_all()
        self._flood(FAIL, body, source)

    def _call(self) -> str:
        """Return this rank's last call and its line; empty for an internal call."""
        call = signatures.describe(self.blob) if self.seq else ""
        return "" if call == signatures.UNKNOWN else call

    def _state(self, group: str) -> State:
        """Return this rank's progress, also in the named group."""
        last, step = self.steps.last or self._call(), self.steps.counts.get(group, 0)
        return State(stack_of(self.thread_id), last, self.seq, self._awaited(), step)

    def _awaited(self) -> list[int]:
        positions, got = self.waits
        return [position for position in positions if position not in got]

    def _ask(self, positions: Iterable[int], group: str = "") -> dict[int, State]:
        """Return the states of other ranks that answer in time; stopped ones aren't asked."""
        asked = [position for position in positions if position != self.position]
        asked = [position for position in asked if not is_stopped(self.pids.get(position))]
        with self._condition.lock:
            for position in asked:
                self._answers.pop(position, None)  # an earlier answer is out of date
        for position in asked:
            self._forward(ASK, {"to": position, "of": self.position, "group": group}, position)
        self._condition.wait(lambda: all(position in self._answers for position in asked), _ASK_S)
        return {
            position: state
            for position in asked
            if (state := self._answers.get(position)) is not None
        }

    def _missing(self, position: int, states: Mapping[int, State]) -> Missing:
        """Return the description of a missing rank, given states from `_ask`."""
        state = states.get(position, State())
        # A silent rank may wait for one below it; `behind` begins with the rank itself.
        behind = () if position in states else self.links.behind.get(position, ())[1:]
        rank, pid = self.ranks[position], self.pids.get(position)
        return Missing(rank, [self.ranks[far] for far in behind], pid, state.stack, state.last)

    def _report(self, states: dict[int, State]) -> str:
        """Return a description of the calls that arrived, and of the missing ranks."""
        absent, got = self._awaited(), self.waits[1]
        arrived = {self.position: self.blob}
        for source, (blobs, _) in got.items():
            # The blobs of the rank above are left out: in `behind` it has no positions.
            arrived |= zip(sorted(self.links.behind.get(source, ())), blobs, strict=False)
        by_rank = {
            self.ranks[position]: signatures.describe(blob) for position, blob in arrived.items()
        }
        missing = []
        for position in absent:  # it grows
            state = states.get(position, State())
            if state.seq < self.seq:
                missing.append(self._missing(position, states))
                continue
            # The rank has arrived, and waits for others itself.
            by_rank[self.ranks[position]] = state.last or signatures.UNKNOWN
            known = {*arrived, *absent}
            further = {far for far in state.waits_for if 0 <= far < len(self.ranks)} - known
            states |= self._ask(further)
            absent += sorted(further)
        return report(signatures.call_of(self.blob), by_rank, missing)

    def _next_hop(self, position: int) -> int:
        """Return the neighbour through which a rank is reached; -1 for none."""
        return self._next_hops.get(position, -1 if self.links.up is None else self.links.up)

    def _flood(self, kind: int, body: bytes, source: int | None = None) -> None:
        for position in self.sideband:
            if position != source:
                self._send(kind, body, position)

    def _forward(self, kind: int, message: dict[str, Any], position: int) -> None:
        self._send(kind, json.dumps(message).encode(), self._next_hop(position))

    def _send(self, kind: int, body: bytes, position: int) -> None:
        if position in self.sideband:
            with contextlib.suppress(ConnectionClosed, TimeoutError), self._condition.lock:
                self.sideband[position].send(kind, 0, body, time.monotonic() + _SEND_S)

    def _serve(self) -> None:
        """Serve the sideband in its thread until `close` writes to the pipe."""
        positions = {connection.fd: position for position, connection in self.sideband.items()}
        readable = select.poll()
        for fd in (self._wake_reader, *positions):
            readable.register(fd, select.POLLIN)
        is_over = False
        while not is_over:
            for fd, _ in readable.poll():
                if fd in positions:
                    self._serve_neighbour(positions[fd], readable)
                else:
                    is_over = True  # `close` has written; this poll's other frames are still served
        os.close(self._wake_reader)
        for connection in self.sideband.values():
            connection.close()

    def _serve_neighbour(self, position: int, readable: select.poll) -> None:
        """Process a neighbour's frames; stop watching it once its connection has closed."""
        connection = self.sideband[position]
        try:
            while (frame := connection.take()) is not None:
                self._handle(frame[0], frame[2], position)
        except ConnectionClosed:
            readable.unregister(connection.fd)
            self._record_departure(position, None, position)

    def _handle(self, kind: int, body: bytes, source: int) -> None:
        """Process one frame; raise ConnectionClosed for one that can't be read."""
        if kind == FAIL:
            read_failure(body)  # only a valid report is forwarded
            self._flood_failure(body, source)
            return
        try:
            message = json.loads(body)
            if kind == LEAVE:
                departure = _read_departure(message["departure"])
                self._record_departure(int(message["position"]), departure, source)
            elif kind == LATE:
                group, step, text = message["group"], message["step"], message["text"]
                self._record_late(str(group), int(step), str(text), source)
            elif int(message["to"]) != self.position:
                self._forward(kind, message, int(message["to"]))
            elif kind == ASK:
                asker, state = int(message["of"]), asdict(self._state(str(message["group"])))
                self._forward(ANSWER, {"to": asker, "of": self.position, "state": state}, asker)
            elif kind == ANSWER:
                with self._condition.lock:
                    self._answers[int(message["of"])] = _read_state(message["state"])
                    self._condition.notify_all()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise ConnectionClosed("it sent an invalid message on its sideband") from None

    def _record_departure(self, position: int, departure: Departure | None, source: int) -> None:
        """Record that a rank is gone; report that to neighbours on its host."""
        with self._condition.lock:
            if position in self._departures:
                return
            self._departures[position] = departure
            self._condition.notify_all()
        # Ranks of its host see the process end, but not whether the rank left in good order.
        if position in self.pids:
            body = _encode_departure(position, departure)
            for other in self.links.downs:
                if other != source and other in self.pids:
                    self._send(LEAVE, body, other)


def _open_pidfds(pids: Mapping[int, int]) -> dict[int, int]:
    """Open, for each process, a descriptor that becomes readable when the process ends."""
    opened: dict[int, int] = {}
    if hasattr(os, "pidfd_open"):  # Linux only
        for position, pid in pids.items():
            with contextlib.suppress(OSError):  # an old kernel, or the process has just ended
                opened[position] = os.pidfd_open(pid)
    return opened


def _encode_departure(position: int, departure: Departure | None) -> bytes:
    fields = None if departure is None else asdict(departure)
    return json.dumps({"position": position, "departure": fields}).encode()


def _read_departure(fields: Any) -> Departure | None:
    if fields is None:
        return None
    steps = {str(group): int(count) for group, count in fields["steps"].items()}
    return Departure(str(fields["how"]), steps)


def _read_state(fields: Any) -> State:
    stack, last = str(fields["stack"]), str(fields["last"])
    waits_for = [int(position) for position in fields["waits_for"]]
    return State(stack, last, int(fields["seq"]), waits_for, int(fields["step"]))
