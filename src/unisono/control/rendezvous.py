"""Rendezvous: how the ranks of a group find each other for the control plane, over the data plane.

Each rank advertises where it can be reached, and a random key. All keys together make a secret,
with which both ends of every connection prove that they belong to the group. The job's own secret
goes into it where its ranks were given one. Where they weren't, and the kernel says that all are
processes of one user on one host, they agree on one over those connections, and then prove
themselves on the data plane too.
Ranks of one host meet at an abstract Unix-domain socket (Linux; elsewhere in a directory of mode
0700), leaders of hosts over TCP. Nothing listens any more once all are connected.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Protocol, TypeVar

from unisono.arguments import number_in
from unisono.control.absent_ranks import warn_after_s
from unisono.control.addresses import BACKLOG, bind_widely, listen_locally, local_address, peer
from unisono.control.connection import Connection
from unisono.control.handshake import Provable, accept_authenticated, authenticate
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import FAN_OUT, Links, Seat, links
from unisono.deadlines import host_s, limit_of
from unisono.errors import CollectiveError, EnvironmentDetectionError, PeerRefusedError
from unisono.host import arena, memory
from unisono.host.arena import Arena
from unisono.host.mailbox import MAILBOX_BYTES, Mailbox, receive, send
from unisono.model import fallback
from unisono.topology import Group, boot_id, name_of, usable_cores

_log = logging.getLogger(__name__)
_SET_UP_S = 10.0
_RETRY_S = 0.01
_HELLO = struct.Struct("<II16s")
_PROOF_BYTES = 32
_ACCEPTED = b"!"
_REMEDY_HERE = "let this user's processes meet at Unix-domain sockets"
_REMEDY_BETWEEN = (
    "let the hosts reach each other over TCP; UNISONO_SOCKET_IFNAME names the interface for it"
)
_UNPROVED = "; nothing proves there who belongs to the job"
_ROUNDS, _SIDEBAND = 0, 1  # the two connections to each neighbour
Endpoint = tuple[socket.socket, Mailbox | None]
_SHARED_BYTES = 32 << 20  # of memory for tensors, by default, for each rank of a host
_PART_OF_REST = 4
_ENTRY_BYTES = 64  # upper bound of what an entry of a round takes besides its blob
T = TypeVar("T")


@dataclass(slots=True)
class _Advertisement:
    """What a rank tells all others of itself."""

    host: str
    hostname: str
    pid: int
    user: int | None
    pid_namespace: str
    key: str
    reason: str = ""
    unix: str = ""
    tcp: tuple[str, int] = ("", 0)
    warn_after_s: float = 0.0
    fan_out: int = 0
    most_bytes: int = 0
    shared_bytes: int = 0
    debug: str = ""
    wrong_setting: dict[str, Any] | None = None


@dataclass(slots=True)
class _Vote:
    """How a rank has fared."""

    reason: str = ""
    refused: str = ""
    instead: int = -1
    shares_memory: bool = False
    has_arena: bool = False


def host_of_this_process() -> str:
    """Name what this process shares with those that it can reach by a Unix-domain socket."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    return f"{socket.gethostname()} {os.getuid() if hasattr(os, 'getuid') else ''}"


def _advertise(control: Connectable, host: str | None) -> _Advertisement:
    """Describe this process and its user's settings; a wrong one, so that all ranks refuse it."""
    own = _Advertisement(
        host=host_of_this_process() if host is None else host,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        user=os.getuid() if hasattr(os, "getuid") else None,
        pid_namespace=_pid_namespace(),
        key=secrets.token_bytes(16).hex(),
    )
    own.debug = control.setting
    try:
        own.warn_after_s = warn_after_s()
        own.fan_out = int(number_in("UNISONO_FAN_OUT", FAN_OUT, least=1))
        own.most_bytes = int(number_in("UNISONO_INLINE_BYTES", MAILBOX_BYTES))
        own.shared_bytes = _most_shared_bytes(control)
    except EnvironmentDetectionError as error:
        own.wrong_setting = {
            "message": str(error),
            "source": error.source,
            "variable": error.variable,
            "value": error.value,
        }
    return own


def _most_shared_bytes(control: Connectable) -> int:
    """Give what one more group may share for tensors: the first all, others a part of the rest."""
    model, held_bytes = control.model, control.shared_bytes
    if model.transport_device.type != "cpu":
        return 0
    ranks = model.topology.local_world_size or model.topology.world_size
    limit_bytes = int(number_in("UNISONO_SHARED_BYTES", ranks * _SHARED_BYTES))
    return max(0, limit_bytes - held_bytes) // (_PART_OF_REST if held_bytes else 1)


def _refuse_wrong_settings(adverts: Iterable[_Advertisement], ranks: Sequence[int]) -> None:
    """Raise the same on every rank if a setting of one is wrong."""
    for rank, advert in zip(ranks, adverts, strict=True):
        wrong = advert.wrong_setting
        if wrong is not None:
            wrong["message"] = f"rank {rank}: {wrong['message']}"
            raise EnvironmentDetectionError(**wrong)


def _foreign_host_error(
    adverts: Sequence[_Advertisement], ranks: Sequence[int], place: int
) -> PeerRefusedError:
    """Say which rank of a job of one host is on another one, or another user's."""
    own = adverts[place]
    other = next(at for at, advert in enumerate(adverts) if advert.host != own.host)
    if adverts[other].user != own.user:
        what = f"a process of user {adverts[other].user}"
    else:
        what = "on another host, or in another network namespace"
    return PeerRefusedError(
        f"rank {ranks[place]} refuses rank {ranks[other]}, which is {what}: all ranks of this job "
        "are to be this user's on this host; give MASTER_ADDR an address that isn't the loopback, "
        "and the number of nodes, where that isn't so",
        ranks[other],
    )


def _pid_namespace() -> str:
    """Name what processes share that see each other by the same ids, empty if unknown."""
    with contextlib.suppress(OSError):  # Linux alone has it
        return os.readlink("/proc/self/ns/pid")
    return ""


class Connectable(Protocol):
    """What this file needs of a control plane."""

    steps: SequenceNumbers
    secret: bytes | None
    is_one_host: bool
    has_levels: bool
    proved: set[str]
    timeout_s: float | None
    setting: str

    @property
    def model(self) -> Provable:
        """What carries the advertisements."""

    @property
    def shared_bytes(self) -> int:
        """What this rank's groups share for tensors so far."""


def connect_group(
    control: Connectable, group: Group | None, inline_bytes: int, host: str | None = None
) -> Hub | None:
    """Connect the ranks of a group."""
    # Collective over `group`, in two rounds of the derived exchange; three where hosts differ.
    name = name_of(group)
    if control.secret is not None and name not in control.proved:
        authenticate(control.model, group, control.secret, name)
        control.proved.add(name)
    hub, is_one_host = _connect_all(control, group, inline_bytes, host)
    if hub is not None and is_one_host and control.secret is None:
        # The kernel has said of each that it is this user's: what they agree on there is a secret.
        shares, _ = hub.exchange(secrets.token_bytes(32), time.monotonic() + host_s(_SET_UP_S))
        secret = hashlib.sha256(b"".join(shares))
        try:
            authenticate(control.model, group, secret.digest(), name)
        except BaseException:  # Ctrl-C too: nobody else has the hub yet
            hub.peers.close()
            raise
        control.proved.add(name)
        if group is None:  # every rank of the context has it, or none has
            control.secret = secret.digest()
    return hub


def _connect_all(
    control: Connectable, group: Group | None, inline_bytes: int, host: str | None
) -> tuple[Hub | None, bool]:
    """Connect the ranks, and tell whether all are processes of one user on one host."""
    model = control.model
    ranks, place = model.topology.members(group), model.topology.position(group)
    hub, votes = None, [_Vote()]
    with contextlib.ExitStack() as stack:
        adverts, listeners = _exchange_adverts(control, group, host, stack)
        _refuse_wrong_settings(adverts, ranks)
        is_one_host = len(_places_by_host(adverts)) == 1
        if control.is_one_host and not is_one_host and host is None:
            raise _foreign_host_error(adverts, ranks, place)
        reasons = _reasons(adverts)
        if not any(reasons):
            has_arena = is_one_host or (control.has_levels and group is None)
            hub, vote = _try_to_connect(
                control, adverts, ranks, listeners, inline_bytes, has_arena=has_arena
            )
            votes = _vote(model, vote, group, hub)
            reasons = _reasons(votes)
    if hub is not None and not any(reasons):
        hub.all_share_memory, have_arenas = _shared_by_all(votes)
        if have_arenas:
            hub.hosts = [[ranks[at] for at in each] for each in _places_by_host(adverts).values()]
        else:
            hub.arena = None
        hub.checks = checks_by([advert.debug for advert in adverts])
        hub.inline_bytes = min(
            _inline_bytes(hub, len(ranks), inline_bytes),
            _least_inline_bytes(adverts),
        )
        return hub, is_one_host
    if hub is not None:
        hub.peers.close()
    if place == 0:
        text = "; ".join(f"rank {r}: {why}" for r, why in zip(ranks, reasons, strict=True) if why)
        remedy = _REMEDY_HERE if is_one_host else _REMEDY_BETWEEN
        _warn_once(text, remedy, _UNPROVED if control.secret is None else "")
    return None, is_one_host


def _try_to_connect(
    control: Connectable,
    adverts: list[_Advertisement],
    ranks: tuple[int, ...] | range,
    listeners: list[socket.socket],
    inline_bytes: int,
    *,
    has_arena: bool,
) -> tuple[Hub | None, _Vote]:
    place = ranks.index(control.model.topology.rank)
    until, tensors = _until(control), _Memory(adverts, place, has_arena)
    try:
        part = links(_hosts(adverts), place, adverts[0].fan_out)
        connections = _connect(
            adverts, place, part, listeners, inline_bytes, until, control.secret, tensors
        )
        is_world = ranks == range(control.model.topology.world_size)  # of a group it is a tuple
        peers = Peers(
            *(ranks, place, part, connections, _pids_of_host(adverts, place)),
            *(control.steps, _seats(adverts) if is_world else ()),
        )
        hub = Hub(peers, tensors.arena, adverts[place].warn_after_s)
    except _RefusedError as error:
        return None, _Vote(refused=str(error), instead=ranks[error.place])
    except OSError as error:
        return None, _Vote(reason=_text_of(error))
    return hub, _Vote(shares_memory=hub.shares_memory, has_arena=tensors.is_had)


def _seats(adverts: list[_Advertisement]) -> tuple[Seat, ...]:
    """Tell which ranks see each other's processes."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, advert in enumerate(adverts):
        places.setdefault((advert.host, advert.pid_namespace), []).append(place)
    return tuple(Seat(adverts[each[0]].hostname, tuple(each)) for each in places.values())


# What follows from all records is worked out apart from what one rank makes of it.
def _places_by_host(adverts: list[_Advertisement]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for place, advert in enumerate(adverts):
        places.setdefault(advert.host, []).append(place)
    return places


def _hosts(adverts: list[_Advertisement]) -> list[str]:
    return [advert.host for advert in adverts]


def _reasons(records: Sequence[_Advertisement | _Vote]) -> list[str]:
    return [each.reason for each in records]


def _least_inline_bytes(adverts: list[_Advertisement]) -> int:
    return min(advert.most_bytes for advert in adverts)


def checks_by(settings: Sequence[str]) -> bool | None:
    """Return whether ranks compare calls: where one wants it; not where no one does."""
    if "1" in settings:
        return True
    return False if set(settings) == {"0"} else None


def _keys(adverts: list[_Advertisement]) -> bytes:
    return "".join(advert.key for advert in adverts).encode()


def _refusals(votes: list[_Vote]) -> list[int]:
    return [place for place, each in enumerate(votes) if each.refused]


def _shared_by_all(votes: list[_Vote]) -> tuple[bool, bool]:
    """Return whether all share memory for rounds, and whether all have memory for tensors."""
    return all(each.shares_memory for each in votes), all(each.has_arena for each in votes)


def _inline_bytes(hub: Hub, size: int, inline_bytes: int) -> int:
    """Return the longest blob of a round: every rank gets the blobs of all."""
    if hub.all_share_memory:
        return max(inline_bytes, MAILBOX_BYTES // size - _ENTRY_BYTES)
    return min(inline_bytes, MAILBOX_BYTES // size)


def _until(control: Connectable) -> float:
    limit_s = limit_of(control.timeout_s)
    return time.monotonic() + host_s(_SET_UP_S if limit_s is None else min(limit_s, _SET_UP_S))


class _RefusedError(OSError):
    """What is there in place of a member isn't one."""

    def __init__(self, place: int, text: str) -> None:
        super().__init__(text)
        self.place = place


def _vote(model: Provable, vote: _Vote, group: Group | None, hub: Hub | None) -> list[_Vote]:
    """Tell every rank how this one has fared; if one was refused, every rank raises."""
    try:
        votes = _exchange(model, vote, group)
    except CollectiveError as error:
        if hub is not None:
            hub.peers.close()
        if vote.refused:  # a stranger in the job need not vote
            raise PeerRefusedError(vote.refused, vote.instead) from error
        raise
    refusals, own = _refusals(votes), model.topology.position(group)
    if refusals:
        at = own if own in refusals else refusals[0]  # what this rank saw itself comes first
        if hub is not None:
            hub.peers.close()
        rank = model.topology.members(group)[at]
        raise PeerRefusedError(f"rank {rank}: {votes[at].refused}", votes[at].instead)
    return votes


def _exchange_adverts(
    control: Connectable,
    group: Group | None,
    host: str | None,
    stack: contextlib.ExitStack,
) -> tuple[list[_Advertisement], list[socket.socket]]:
    """Tell every rank where every rank can be reached, or why it can't."""
    # The leader of a host takes a port only where there is another host, and after that is known.
    listeners: list[socket.socket] = []
    model, advert = control.model, _advertise(control, host)
    try:
        listener, advert.unix = listen_locally(stack)
        listeners.append(listener)
    except OSError as error:
        advert.reason = _text_of(error)
    adverts = _exchange(model, advert, group)
    places = _places_by_host(adverts)
    if len(places) == 1:
        return adverts, listeners
    place = model.topology.position(group)
    if places[adverts[place].host][0] == place:
        try:
            listener, advert.tcp = bind_widely(stack)
            listeners.append(listener)
        except OSError as error:
            advert.reason = advert.reason or _text_of(error)
    return _exchange(model, advert, group), listeners


def _exchange(model: fallback.CollectiveTransport, own: T, group: Group | None) -> list[T]:
    """Give every rank the records of all."""
    fields: Any = own
    blobs = fallback.exchange(model, json.dumps(asdict(fields)).encode(), group)
    try:
        return [type(own)(**json.loads(blob)) for blob in blobs]
    except (ValueError, TypeError, RecursionError) as error:
        raise CollectiveError(f"a rank sent what can't be read: {error}") from None


def _text_of(error: OSError) -> str:
    return str(error) or type(error).__name__


@cache
def _warn_once(reasons: str, remedy: str, unproved: str) -> None:
    _log.warning(
        "the control plane stays on the model's own collectives, with the same results but slower: "
        "%s%s; to have it faster, %s",
        reasons,
        unproved,
        remedy,
    )


# A connection between a rank and the one above it; a wrong or missing message ends in `closed`:
#
#   below                                        above
#   connect                                      accept; a process of another user: closed
#   HELLO: place, channel, nonce       ------>   is that place expected? no: closed
#   proof right? no: refused           <------   proof for that nonce, own nonce
#   proof for that nonce               ------>   right? no: closed, and its sender is reported
#   connected                          <------   on one host the mailbox of the rounds, and memory
#                                                for tensors; else ACCEPTED
#                                                connected
#
# A rank connects upwards first and then accepts: a rank below waits until its listener answers.
def _connect(
    adverts: list[_Advertisement],
    place: int,
    part: Links,
    listeners: list[socket.socket],
    inline_bytes: int,
    until: float,
    job_secret: bytes | None,
    tensors: _Memory,
) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connect upwards first, so that the tree is made from its root down."""
    hosts = _hosts(adverts)
    secret = hashlib.sha256((job_secret or b"") + _keys(adverts)).digest()
    made: dict[tuple[int, int], Endpoint] = {}
    try:
        if any(hosts[down] != hosts[place] for down in part.downs):
            listeners[1].listen(BACKLOG)
        if part.up is not None:
            for channel in (_ROUNDS, _SIDEBAND):
                made[part.up, channel] = _connect_to_parent(
                    adverts, place, part.up, channel, secret, until
                )
            tensors.receive(made[part.up, _ROUNDS][0])
        tensors.make()
        made.update(_accept_children(hosts, place, part, listeners, secret, until, tensors))
    except BaseException:  # Ctrl-C too: no descriptor is left open
        for sock, _ in made.values():
            sock.close()
        raise
    finally:
        tensors.close()
    limits = (max(MAILBOX_BYTES, len(adverts) * (inline_bytes + _ENTRY_BYTES)), 1 << 20)
    rounds, sideband = (
        {at: Connection(*made[at, channel], limit_bytes) for at, kind in made if kind == channel}
        for channel, limit_bytes in zip((_ROUNDS, _SIDEBAND), limits, strict=True)
    )
    return rounds, sideband


class _Memory:
    """What the ranks of this host share for tensors: made by the first, sent to the others."""

    def __init__(self, adverts: list[_Advertisement], place: int, is_used: bool) -> None:
        places = _places_by_host(adverts)[adverts[place].host]
        self._size, self._position = len(places), places.index(place)
        self._is_used = is_used
        self._most_bytes = min(adverts[at].shared_bytes for at in places)
        self._fd: int | None = None
        self.arena: Arena | None = None

    @property
    def is_had(self) -> bool:
        """Whether the ranks of this host have it, or this one is alone there."""
        return self.arena is not None or self._size == 1

    def make(self) -> None:
        """Make it, where this rank is the first of several."""
        if self._is_used and self._position == 0 and self._size > 1:
            made = arena.make(self._size, usable_cores(), self._most_bytes)
            if made is not None:
                self._fd, self.arena = made

    def send(self, sock: socket.socket) -> None:
        """Send it to a rank of this host."""
        memory.send(sock, self._fd)

    def receive(self, sock: socket.socket) -> None:
        """Receive it from the first rank, where this one isn't it."""
        if self._position > 0:  # on every host: its first rank says at least that there is none
            try:
                shared = memory.receive(sock)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                shared = None  # it came, and there is no room to map it
            if shared is not None:
                self.arena = arena.read(shared, self._size, self._position)

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as somebody maps it."""
        if self._fd is not None:
            os.close(self._fd)


def _pids_of_host(adverts: list[_Advertisement], place: int) -> dict[int, int]:
    """Return the process ids of the others on this host, if they share its pid namespace."""
    own = adverts[place]
    if not own.pid_namespace:
        return {}
    return {
        other: adverts[other].pid
        for other in _places_by_host(adverts)[own.host]
        if other != place and adverts[other].pid_namespace == own.pid_namespace
    }


def _proof(secret: bytes, side: bytes, nonce: bytes, place: int, channel: int) -> bytes:
    return hmac.new(secret, side + struct.pack("<II", place, channel) + nonce, "sha256").digest()


def _connect_to_parent(
    adverts: list[_Advertisement], place: int, up: int, channel: int, secret: bytes, until: float
) -> Endpoint:
    """Connect to the rank above, and let each prove itself to the other."""
    advert = adverts[up]
    address: Any
    is_local = advert.host == adverts[place].host
    if is_local:
        family, address = int(socket.AF_UNIX), local_address(advert.unix)
    else:
        family, address = int(socket.AF_INET), tuple(advert.tcp)
    sock = _connect_until(family, address, until)
    try:
        if is_local and not (owner := peer(sock)).is_own_user:
            raise _RefusedError(up, f"{owner} listens in place of a rank: it isn't of this job")
        nonce = secrets.token_bytes(16)
        sock.sendall(_HELLO.pack(place, channel, nonce))
        reply = _read(sock, _PROOF_BYTES + 16)
        if not hmac.compare_digest(
            reply[:_PROOF_BYTES], _proof(secret, b"up", nonce, place, channel)
        ):
            raise _RefusedError(up, f"who listens at {address!r} doesn't belong to this job")
        sock.sendall(_proof(secret, b"down", reply[_PROOF_BYTES:], place, channel))
        if is_local and channel == _ROUNDS:
            return sock, receive(sock)
        if _read(sock, len(_ACCEPTED)) != _ACCEPTED:
            raise OSError("refused")
    except BaseException:  # as above
        sock.close()
        raise
    return sock, None


def _connect_until(family: int, address: Any, until: float) -> socket.socket:
    """Connect; a leader elsewhere may not listen yet, and the queue of one here may be full."""
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, until - time.monotonic()))
        try:
            sock.connect(address)
        except BaseException as error:
            sock.close()
            is_early = isinstance(error, (ConnectionRefusedError, BlockingIOError))
            if not is_early or time.monotonic() >= until:
                raise
            time.sleep(_RETRY_S)
            continue
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return data


def _accept_children(
    hosts: list[str],
    place: int,
    part: Links,
    listeners: list[socket.socket],
    secret: bytes,
    until: float,
    tensors: _Memory,
) -> Iterator[tuple[tuple[int, int], Endpoint]]:
    """Accept the connections of the ranks below; strangers are dropped."""
    for is_local in (True, False):
        expected = {
            (down, channel)
            for down in part.downs
            for channel in (_ROUNDS, _SIDEBAND)
            if (hosts[down] == hosts[place]) is is_local
        }
        if not expected:
            continue
        strangers: set[str] = set()
        check = partial(
            _authenticate_child,
            expected=expected,
            secret=secret,
            is_local=is_local,
            refused=strangers.add,
            tensors=tensors,
        )
        listener = listeners[0] if is_local else listeners[1]
        accepted = accept_authenticated(listener, check, until, refused=strangers.add)
        with contextlib.closing(accepted) as children:
            for sock, (child, mailbox) in children:
                expected.discard(child)
                yield child, (sock, mailbox)
                if not expected:
                    break
        if expected:
            late = sorted({down for down, _ in expected})
            text = f"places {late} of the group didn't connect in time"
            if strangers:
                who = ", ".join(sorted(strangers))
                raise _RefusedError(late[0], f"{text}, and who came isn't of this job: {who}")
            raise OSError(text)


def _authenticate_child(
    sock: socket.socket,
    expected: set[tuple[int, int]],
    secret: bytes,
    is_local: bool,
    refused: Callable[[str], None],
    tensors: _Memory,
) -> Generator[int, bytes, tuple[tuple[int, int], Mailbox | None] | None]:
    if not is_local:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    place, channel, nonce = _HELLO.unpack((yield _HELLO.size))
    if (place, channel) not in expected:
        return None
    mine = secrets.token_bytes(16)
    sock.sendall(_proof(secret, b"up", nonce, place, channel) + mine)
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(secret, b"down", mine, place, channel)):
        who = str(peer(sock)) if is_local else f"a process at {sock.getpeername()[0]}"
        refused(f"{who} without the job's secret")
        return None
    if is_local and channel == _ROUNDS:
        mailbox = send(sock)
        tensors.send(sock)
        return (place, channel), mailbox
    sock.sendall(_ACCEPTED)
    return (place, channel), None
