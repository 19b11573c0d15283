"""The control plane of 2 to 10,000 ranks in one process: the real code over connections in memory.

Each simulated rank runs the code of a real one: it meets the other ranks, connects to its
neighbours with both proofs, takes part in rounds, and reports its departure. The simulation counts
events, such as sent messages and opened descriptors. `count` counts the same events in the ranks of
a real job, which behave as if they were on several hosts.

Only the control plane is simulated: records of the rendezvous, which the data plane carries, pass
by reference, and so do the bodies of messages. Results that are the same on all ranks, such as the
parts of a message, are computed once.

    python -m tests.support.simulation [2 8 64 1000 10000]
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from struct import Struct
from typing import Any
from unittest.mock import patch

import torch

import unisono
from tests.support.simulated_kernel import Kernel, Process, Waitable
from unisono.context import communicator
from unisono.control import hub, rendezvous
from unisono.control.connection import ALL, GIVE, Connection, split_blobs
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.plane import SocketControlPlane
from unisono.control.signatures import call_head
from unisono.errors import PeerFailedError
from unisono.host.mailbox import MAILBOX_BYTES
from unisono.topology import EVERYBODY, Topology

SIZES = (2, 8, 16, 64, 256, 1000, 4096, 10_000)
_KINDS = ("GIVE", "ALL", "FAIL", "NOTICE", "ASK", "ANSWER", "LATE", "LEAVE")
_BLOB = call_head("barrier", b"train.py:12")
_VARIABLES = {"UNISONO_SHARED_BYTES": "0"}  # memory for tensors isn't the control plane's


@dataclass(slots=True)
class Tally:
    """Counts of one rank's events.

    Args:
        messages: number of sent messages, by kind.
        sent_bytes: sum over the bodies that it sent in rounds.
        below: places to which it has sent others' blobs, or those that end a round.
        connections: number of connections made, for rounds and for the sideband.
        mailboxes: number of connections with a mailbox.
        held_bytes: bytes of mailboxes that messages have filled.
        descriptors: number of open descriptors more than before.
        threads: number of threads more than before.
        longest: length of the longest body in a mailbox, by place and kind.
    """

    messages: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    below: set[int] = field(default_factory=set)
    connections: int = 0
    mailboxes: int = 0
    held_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    longest: dict[tuple[int, int], int] = field(default_factory=dict)

    def note(self, kind: int, body: bytes) -> None:
        """Count a message."""
        self.messages[_KINDS[kind]] += 1

    def note_round(self, kind: int, place: int, body: bytes) -> None:
        """Count a message of a round, sent to the rank at `place`."""
        self.note(kind, body)
        self.sent_bytes += len(body)
        if kind == ALL:
            self.below.add(place)


class _CountedMailbox:
    def __init__(self, mailbox: Any, put: Callable[[int, int, bytes], bool]) -> None:
        self._mailbox, self.put = mailbox, put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mailbox, name)


@contextmanager
def counting(tally_of: Callable[[], Tally]) -> Iterator[None]:
    """Count the messages and connections of ranks within the block.

    Args:
        tally_of: returns the tally of the rank that is running.
    """
    make, connect, send_aside = Connection.__init__, Hub.__init__, Peers._send

    def made(self: Connection, sock: Any, mailbox: Any, limit_bytes: int) -> None:
        make(self, sock, mailbox, limit_bytes)
        tally_of().connections += 1
        tally_of().mailboxes += mailbox is not None

    def connected(self: Hub, *args: Any) -> None:
        connect(self, *args)
        for place, line in self._connections.items():
            each: Any = line
            each.send = partial(sent, place, line.send)
            if line.mailbox is not None:
                each.mailbox = _CountedMailbox(line.mailbox, partial(put, place, line.mailbox.put))

    def sent(place: int, send: Callable[..., None], kind: int, *rest: Any) -> None:
        if kind in (GIVE, ALL):
            tally_of().note_round(kind, place, rest[1])
        send(kind, *rest)

    def put(place: int, put: Callable[..., bool], kind: int, seq: int, body: bytes) -> bool:
        if len(body) <= MAILBOX_BYTES:  # else the socket carries it
            tally = tally_of()
            tally.note_round(kind, place, body)
            tally.longest[place, kind] = max(tally.longest.get((place, kind), 0), len(body))
            tally.held_bytes = sum(tally.longest.values())
        return put(kind, seq, body)

    def sent_aside(self: Peers, kind: int, body: bytes, place: int) -> None:
        if place in self.sideband:
            tally_of().note(kind, body)
        send_aside(self, kind, body, place)

    with (
        patch.object(Connection, "__init__", made),
        patch.object(Hub, "__init__", connected),
        patch.object(Peers, "_send", sent_aside),
    ):
        yield


def take_part(plane: SocketControlPlane, rounds: int) -> None:
    """Act as a rank, which connects in the first round and takes part in all."""
    size = plane.model.topology.world_size
    for _ in range(rounds):
        assert len(plane.exchange(_BLOB)) == size


def new_plane(model: Any) -> SocketControlPlane:
    """Make a control plane whose ranks have proved on the data plane that they are of the job."""
    plane = SocketControlPlane(model, 60.0)
    plane.secret, plane.proved = bytes(32), {EVERYBODY}
    return plane


# In a real job


def count(_local_rank: int, per_host: Sequence[int], rounds: int) -> list[Tally]:
    """Count this rank's events in further control planes over the job's data plane.

    Collective over all ranks.

    Args:
        per_host: for each control plane, the number of ranks that it sees on a host.
        rounds: number of rounds of each control plane.
    """
    return [_count(each, rounds) for each in per_host]


def _count(per_host: int, rounds: int) -> Tally:
    model, tally = communicator().model, Tally()
    host = f"host {model.topology.rank // per_host}"
    plane = new_plane(model)
    n_open, threads = _n_open(), {*threading.enumerate()}
    alter = patch.object(rendezvous, "host_of_this_process", lambda: host)
    with counting(lambda: tally), alter, patch.dict(os.environ, _VARIABLES):
        take_part(plane, rounds)
        more = {*threading.enumerate()} - threads
        tally.descriptors, tally.threads = _n_open() - n_open, len(more)
    unisono.barrier()
    plane.close()
    for thread in more:  # `close` makes these threads close the connections and end
        thread.join()
    return tally


def _n_open() -> int:
    return len(os.listdir("/proc/self/fd"))


# In memory


@dataclass
class _Model:
    """The part of a model that the control plane uses, without a data plane."""

    topology: Topology
    transport_device: torch.device


class _Board(Waitable):
    """The records of one exchange of the rendezvous, instead of the data plane."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.records: list[Any] = [None] * size
        self.n_missing = size


class Simulation:
    """A job in memory.

    Args:
        size: number of ranks.
        per_host: number of ranks on each host.
        rounds: number of rounds.
        dies: a rank that dies after these rounds, while the others begin one more; None for none.
    """

    def __init__(self, size: int, per_host: int, rounds: int, dies: int | None = None) -> None:
        self.kernel = Kernel()
        self.size, self.rounds, self._dies = size, rounds, dies
        self.tallies = [Tally() for _ in range(size)]
        self.errors: dict[int, PeerFailedError] = {}
        self.seconds = 0.0
        self._boards: list[_Board] = []
        self._turns = [0] * size
        self._models: list[_Model] = []
        for rank in range(size):
            process = Process(rank, f"host {rank // per_host}")
            self.kernel.processes.append(process)
            self.kernel.begin(process, partial(self._rank, process))

    def run(self) -> None:
        """Run the job to its end."""
        names = {"_exchange": self._exchange}
        names |= {name: _once(getattr(rendezvous, name)) for name in _SAME_FOR_ALL}
        begin = time.process_time()
        parts = patch.object(hub, "split_blobs", _split_once)
        alter = patch.dict(os.environ, _VARIABLES)
        with counting(self._tally), alter, parts, self.kernel.under(**names):
            self.kernel.run()
        self.seconds = time.process_time() - begin

    def depth(self) -> int:
        """Return the number of hops from rank 0 to the last rank that gets a result."""
        depth, layer, seen = -1, {0}, {0}
        while layer:
            depth += 1
            layer = {far for place in layer for far in self.tallies[place].below} - seen
            seen |= layer
        return depth

    def _tally(self) -> Tally:
        return self.tallies[self.kernel.process.rank]

    def _rank(self, process: Process) -> None:
        rank, tally = process.rank, self.tallies[process.rank]
        model = _Model(Topology(rank, self.size), torch.device("cpu"))
        self._models.append(model)
        plane = new_plane(model)
        try:
            take_part(plane, self.rounds)
            tally.descriptors, tally.threads = len(process.open), len(process.threads) - 1
            if rank == self._dies:
                plane.disown()  # so that no other rank is notified
                self.kernel.end(process)
                return
            if self._dies is not None:
                take_part(plane, 1)
        except PeerFailedError as error:
            self.errors[rank] = error
        plane.close("" if rank in self.errors else "left")

    def _exchange(self, _model: Any, own: Any, _group: Any) -> list[Any]:
        rank = self.kernel.process.rank
        turn = self._turns[rank]
        self._turns[rank] += 1
        if turn == len(self._boards):
            self._boards.append(_Board(self.size))
        board = self._boards[turn]
        board.records[rank] = type(own)(**json.loads(json.dumps(asdict(own))))
        board.n_missing -= 1
        if board.n_missing == 0:
            self.kernel.wake(board)
        while board.n_missing:
            self.kernel.wait([board], None)
        return board.records


_SAME_FOR_ALL = ("_hosts_of", "_reasons_of")


@lru_cache(maxsize=4)
def _split(body: bytes, count: int, inline_bytes: int) -> Any:
    return split_blobs(body, Struct(f"<{count}Q"), inline_bytes)


def _split_once(body: bytes, head: Struct, inline_bytes: int) -> Any:
    return _split(body, head.size // 8, inline_bytes)


def _once(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a function that depends only on all ranks' records, so that one rank computes it."""
    known: list[tuple[Any, Any]] = []

    def given(records: Any, *args: Any) -> Any:
        for earlier, result in known:
            if earlier is records:
                return result
        result = compute(records, *args)
        known.append((records, result))
        return result

    return given


Row = dict[str, float]


def row_of(job: Simulation) -> Row:
    """Return the counts of a job that has run."""
    tallies, rounds = job.tallies, job.rounds
    messages = [tally.messages["GIVE"] + tally.messages["ALL"] for tally in tallies]
    descriptors = [tally.descriptors for tally in tallies]
    return {
        "ranks": job.size,
        "hosts": len({process.host for process in job.kernel.processes}),
        "depth": job.depth(),
        "messages a round": sum(messages) / rounds,
        "most of a rank": max(messages) / rounds,
        "most KB sent": max(tally.sent_bytes for tally in tallies) / rounds / 1000,
        "most descriptors": max(descriptors),
        "mean descriptors": sum(descriptors) / job.size,
        "most KB held": max(tally.held_bytes for tally in tallies) / 1000,
        "departures": sum(tally.messages["LEAVE"] for tally in tallies),
        "seconds": job.seconds,
    }


def table(rows: Sequence[Row]) -> str:
    """Write rows as a table of Markdown."""
    lines = [list(rows[0]), ["---:"] * len(rows[0])]
    lines += [[_figure(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def simulated(size: int, per_host: int = 8, rounds: int = 2) -> Row:
    """Run a job in memory, and return its counts."""
    job = Simulation(size, per_host, rounds)
    job.run()
    return row_of(job)


if __name__ == "__main__":
    rows = [simulated(size) for size in map(int, sys.argv[1:] or SIZES)]
    sys.stdout.write(f"{table(rows)}\n")
