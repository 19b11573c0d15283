"""Rendezvous of a group's ranks for the control plane, over the data plane.

Each rank advertises its addresses and a random key. All keys together, and the job's own secret if
it has one, make a secret, with which both ends of every connection prove that they belong to the
group. If the job has none, and the kernel confirms that all ranks are processes of one user on one
host, they agree on a secret for the job over these connections, and then prove on the data plane,
too, that they know it.

Ranks of one host meet at an abstract Unix-domain socket (Linux; elsewhere in a directory of mode
0700), leaders of hosts over TCP. All listeners close once the ranks are connected.
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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from unisono.arguments import number_in
from unisono.control.absent_ranks import warn_after_s
from unisono.control.addresses import listen_locally, listen_widely, local_address, peer
from unisono.control.connection import Connection
from unisono.control.handshake import accept, answer, call, receive
from unisono.control.hub import Hub
from unisono.control.peers import Peers
from unisono.control.tree import links
from unisono.deadlines import end_of_call, host_s
from unisono.errors import CollectiveError, EnvironmentDetectionError, PeerRefusedError
from unisono.host import arena, mailbox, memory
from unisono.host.arena import Arena
from unisono.host.mailbox import MAILBOX_BYTES, Mailbox
from unisono.model import fallback
from unisono.model.contract import ComputationModel
from unisono.payload.tensors import from_bytes, to_bytes
from unisono.topology import Group, boot_id, name_of, pid_namespace, usable_cores

if TYPE_CHECKING:
    from unisono.control.plane import SocketControlPlane

_log = logging.getLogger(__name__)
_SET_UP_S = 10.0
_RETRY_S = 0.01
_HELLO = struct.Struct("<II")
_NONCE_BYTES = 32  # as long as a proof: both travel as rows of one size
_ACCEPTED = b"!"
_REMEDY_HERE = "let this user's processes meet at Unix-domain sockets"
_REMEDY_BETWEEN = (
    "let the hosts reach each other over TCP; UNISONO_SOCKET_IFNAME names the interface for it"
)
_UNPROVED = "; membership in the job is not authenticated there"
_ROUNDS, _SIDEBAND = 0, 1  # the two connections to each neighbour
Endpoint = tuple[socket.socket, Mailbox | None]
_SHARED_BYTES = 32 << 20  # of memory for tensors, by default, for each rank of a host
_PART_OF_REST = 4  # a new group takes a quarter of the rest, which leaves room for later ones
_ENTRY_BYTES = 64  # at most so many bytes of a round's entry aren't its blob
_LEAST_INLINE_BYTES = 1 << 16  # through memory, however many ranks there are
# Over sockets, however many ranks there are: longer values are faster on the data plane, measured
# with 2 and 4 ranks on two hosts.
_SOCKET_BODY_BYTES = 1 << 20
T = TypeVar("T")


@dataclass(slots=True)
class _Advertisement:
    """A rank's addresses and settings."""

    host: str
    pid: int
    user: int | None
    pid_namespace: str
    key: str
    reason: str = ""
    unix: str = ""
    tcp: tuple[str, int] = ("", 0)
    warn_after_s: float = 0.0
    shared_bytes: int = 0
    debug: str = ""
    wrong_setting: Sequence[Any] = ()


@dataclass(slots=True)
class _Vote:
    """The outcome of a rank's connections: no `reason` if they succeeded."""

    reason: str = ""
    refused: str = ""
    instead: int = -1
    """The rank for which the refused process had answered."""
    shares_memory: bool = False
    has_arena: bool = False


def host_of_this_process() -> str:
    """Return an id common to processes that can reach each other by Unix-domain sockets."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    return f"{socket.gethostname()} {os.getuid() if hasattr(os, 'getuid') else ''}"


def _advertise(control: SocketControlPlane) -> _Advertisement:
    """Return this rank's advertisement; it reports a wrong setting, so that all ranks raise."""
    advert = _Advertisement(
        host=host_of_this_process(),
        pid=os.getpid(),
        user=os.getuid() if hasattr(os, "getuid") else None,
        pid_namespace=pid_namespace(),
        key=secrets.token_bytes(16).hex(),
        debug=control.setting,
    )
    try:
        advert.warn_after_s, advert.shared_bytes = warn_after_s(), _max_shared_bytes(control)
    except EnvironmentDetectionError as error:
        advert.wrong_setting = error.args
    return advert


def _max_shared_bytes(control: SocketControlPlane) -> int:
    """Return the bytes that a new group may share: all for the first, else a part of the rest."""
    model, held_bytes = control.model, control.shared_bytes
    if model.transport_device.type != "cpu":
        return 0
    # If the number on this host is unknown, all ranks may be here.
    ranks = model.topology.local_world_size or model.topology.world_size
    limit_bytes = int(number_in("UNISONO_SHARED_BYTES", ranks * _SHARED_BYTES))
    return max(0, limit_bytes - held_bytes) // (_PART_OF_REST if held_bytes else 1)


def _other_host_error(
    adverts: Sequence[_Advertisement], ranks: Sequence[int], position: int
) -> PeerRefusedError:
    """Return the error for a rank on another host, or another user's, in a one-host job."""
    mine = adverts[position]
    other = next(position for position, advert in enumerate(adverts) if advert.host != mine.host)
    if adverts[other].user != mine.user:
        what = f"a process of user {adverts[other].user}"
    else:
        what = "on another host, or in another network namespace"
    return PeerRefusedError(
        f"rank {ranks[position]} rejected rank {ranks[other]}, which is {what}: all ranks of this "
        "job must run as this user on this host; for several hosts, set nnodes and a MASTER_ADDR "
        "other than the loopback",
        ranks[other],
    )


def connect_group(control: SocketControlPlane, group: Group | None) -> Hub | None:
    """Connect the ranks of a group; return its hub, None if some can't be connected."""
    # Collective over `group`, in two exchanges on the data plane; in three if hosts differ.
    name = name_of(group)
    if control.secret is not None and name not in control.proved:
        authenticate(control.model, group, control.secret, name)
        control.proved.add(name)
    hub, is_one_host = _connect_all(control, group)
    if hub is not None and is_one_host and control.secret is None:
        # The kernel has confirmed that all are this user's processes, so random numbers of theirs
        # make a secret.
        shares, _ = hub.exchange(secrets.token_bytes(32), _SET_UP_S)
        secret = hashlib.sha256(b"".join(shares)).digest()
        try:
            authenticate(control.model, group, secret, name)
        except BaseException:  # Ctrl-C too: nothing else refers to the hub yet
            hub.peers.close()
            raise
        control.proved.add(name)
        if group is None:  # every rank of the context has it, or none has
            control.secret = secret
    return hub


def authenticate(
    model: ComputationModel,
    group: Group | None,
    secret: bytes,
    label: str,
    device: torch.device | None = None,
) -> None:
    """Raise unless the ranks of a group prove to each other that they know the job's secret."""
    # Collective over `group`. Gloo accepts any connection. Before the proof, the data plane carries
    # only tensors of fixed size that are never decoded: first a random number of each rank, then,
    # from each rank to each other directly, the HMAC of both their numbers.
    ranks, position = model.topology.members(group), model.topology.position(group)
    shape = (len(ranks), _NONCE_BYTES)
    device = model.transport_device if device is None else device
    nonce = from_bytes(secrets.token_bytes(_NONCE_BYTES), torch.uint8, shape[1:]).to(device)
    nonces = [to_bytes(row) for row in model.all_gather(nonce, group).cpu()]
    subject = f"{label} {list(ranks)}".encode()

    def proof(source: int, target: int) -> bytes:
        text = struct.pack("<II", source, target) + nonces[source] + nonces[target] + subject
        return hmac.new(secret, text, "sha256").digest()

    mine = b"".join(proof(position, other) for other in range(len(ranks)))
    received_rows = model.all_to_all(from_bytes(mine, torch.uint8, shape).to(device), group).cpu()
    proofs = [to_bytes(row) for row in received_rows]
    wrong = [
        ranks[other]
        for other in range(len(ranks))
        if other != position and not hmac.compare_digest(proofs[other], proof(other, position))
    ]
    if wrong:
        raise PeerRefusedError(
            f"rank {ranks[position]} rejected the process that answered as rank {wrong[0]}: "
            "authentication failed",
            wrong[0],
        )


def _connect_all(control: SocketControlPlane, group: Group | None) -> tuple[Hub | None, bool]:
    """Connect the ranks, and return whether all are processes of one user on one host."""
    ranks = control.model.topology.members(group)
    with contextlib.ExitStack() as stack:
        adverts, listeners = _exchange_adverts(control, group, stack)
        for rank, advert in zip(ranks, adverts, strict=True):
            if advert.wrong_setting:
                text, *facts = advert.wrong_setting
                raise EnvironmentDetectionError(f"rank {rank}: {text}", *facts)
        connector = _Connector(control, group, adverts, listeners)
        is_one_host = len(connector.hosts) == 1
        if control.is_one_host and not is_one_host:
            raise _other_host_error(adverts, ranks, connector.position)
        reasons, hub = _reasons_of(adverts), None
        if not reasons:  # else all ranks know that one of them can't connect
            hub, vote = connector.connect()
            votes = _exchange_votes(control.model, vote, group, hub)
            reasons = _reasons_of(votes)
    if hub is not None and not reasons:
        hub.all_share_memory = all(vote.shares_memory for vote in votes)
        if all(vote.has_arena for vote in votes):
            hub.hosts = [
                [ranks[position] for position in positions] for positions in connector.hosts
            ]
        else:
            hub.arena = None
        hub.checks = checks_by([advert.debug for advert in adverts])
        hub.inline_bytes = _inline_bytes(hub, len(ranks))
        return hub, is_one_host
    if hub is not None:
        hub.peers.close()
    if connector.position == 0:  # one warning for all ranks
        text = "; ".join(f"rank {ranks[position]}: {why}" for position, why in reasons.items())
        remedy = _REMEDY_HERE if is_one_host else _REMEDY_BETWEEN
        _warn_once(text, remedy, _UNPROVED if control.secret is None else "")
    return None, is_one_host


def _reasons_of(records: Sequence[_Advertisement | _Vote]) -> dict[int, str]:
    """Return the reasons why ranks can't be connected, by position."""
    return {position: each.reason for position, each in enumerate(records) if each.reason}


def _hosts_of(adverts: Sequence[_Advertisement]) -> list[list[int]]:
    """Return the positions on each host; hosts are in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for position, advert in enumerate(adverts):
        hosts.setdefault(advert.host, []).append(position)
    return list(hosts.values())


def checks_by(settings: Sequence[str]) -> bool | None:
    """Return True if a rank's setting is 1, False if all are 0, else None."""
    if "1" in settings:
        return True
    return False if set(settings) == {"0"} else None


def _inline_bytes(hub: Hub, size: int) -> int:
    """Return the size of the longest blob in a round, which carries the blobs of all ranks."""
    if hub.all_share_memory:  # a body that is too long for a mailbox goes over the socket
        return max(_LEAST_INLINE_BYTES, MAILBOX_BYTES // size - _ENTRY_BYTES)
    return _SOCKET_BODY_BYTES // size


class _RefusedError(OSError):
    """A process outside the job answered for a rank."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(text)
        self.position = position


def _exchange_votes(
    model: ComputationModel, vote: _Vote, group: Group | None, hub: Hub | None
) -> list[_Vote]:
    """Return the votes of all ranks; raise on every rank if one refused a process."""
    try:
        votes = _exchange(model, vote, group)
    except CollectiveError as error:
        if hub is not None:
            hub.peers.close()
        if vote.refused:  # a process outside the job need not vote
            raise PeerRefusedError(vote.refused, vote.instead) from error
        raise
    refusals = [position for position, each in enumerate(votes) if each.refused]
    if refusals:
        mine = model.topology.position(group)
        position = mine if mine in refusals else refusals[0]  # this rank's own comes first
        if hub is not None:
            hub.peers.close()
        rank, refusal = model.topology.members(group)[position], votes[position]
        raise PeerRefusedError(f"rank {rank}: {refusal.refused}", refusal.instead)
    return votes


def _exchange_adverts(
    control: SocketControlPlane, group: Group | None, stack: contextlib.ExitStack
) -> tuple[list[_Advertisement], list[socket.socket]]:
    """Return the advertisements of all ranks, and this rank's listeners."""
    # The leader of a host opens a port only once another host is known to exist.
    listeners: list[socket.socket] = []
    model, advert = control.model, _advertise(control)
    try:
        listener, advert.unix = listen_locally(stack)
        listeners.append(listener)
    except OSError as error:
        advert.reason = _text_of(error)
    adverts = _exchange(model, advert, group)
    hosts = [each.host for each in adverts]
    if len(set(hosts)) == 1:
        return adverts, listeners
    if hosts.index(advert.host) == model.topology.position(group):
        try:
            listener, advert.tcp = listen_widely(stack)
            listeners.append(listener)
        except OSError as error:
            advert.reason = advert.reason or _text_of(error)
    return _exchange(model, advert, group), listeners  # now with ports


def _exchange(model: ComputationModel, record: T, group: Group | None) -> list[T]:
    """Return the records of all ranks."""
    fields: Any = record
    blobs = fallback.exchange(model, json.dumps(asdict(fields)).encode(), group)
    try:
        return [type(record)(**json.loads(blob)) for blob in blobs]
    except (ValueError, TypeError, RecursionError) as error:
        raise CollectiveError(f"a rank sent an invalid record: {error}") from None


def _text_of(error: OSError) -> str:
    return str(error) or type(error).__name__


@cache
def _warn_once(reasons: str, remedy: str, unproved: str) -> None:
    _log.warning(
        "falling back to the backend's collectives for small messages (same results, slower): "
        "%s%s; to avoid this, %s",
        reasons,
        unproved,
        remedy,
    )


class _Connector:
    """The set-up of this rank's connections to its neighbours."""

    # A connection between a rank and the one above it, or one across with a lower position; a wrong
    # or missing message ends it:
    #
    #   this rank                                    the other one
    #   connect                                      accept; a process of another user: closed
    #   HELLO: position, channel; proof    <----->   proof; is that rank expected? no: closed
    #   connected                          <------   on one host the mailbox of the rounds, and
    #                                                memory for tensors; else ACCEPTED
    #                                                connected
    #
    # A rank connects to those first and then accepts others: all begins with the first position.

    def __init__(
        self,
        control: SocketControlPlane,
        group: Group | None,
        adverts: list[_Advertisement],
        listeners: list[socket.socket],
    ) -> None:
        self._control, self._group = control, group
        self._adverts, self._listeners = adverts, listeners
        self.position: int = control.model.topology.position(group)
        self.hosts: list[list[int]] = _hosts_of(adverts)
        """The positions on each host."""
        # The positions on this rank's host
        self._local = next(positions for positions in self.hosts if self.position in positions)
        self._links = links(self.hosts, self.position)
        up, across = self._links.up, self._links.across
        # The ranks that this one connects to, and those that connect to it.
        self._called = [other for other in across if other < self.position] if up is None else [up]
        self._callers = [*self._links.downs, *(each for each in across if each > self.position)]
        keys = "".join(advert.key for advert in adverts).encode()
        # Without a secret of the job, the random keys of all ranks have to do.
        self._secret = hashlib.sha256((control.secret or b"") + keys).digest()
        self._until = min(end_of_call(control.timeout_s), time.monotonic() + host_s(_SET_UP_S))
        self._arena: Arena | None = None
        self._arena_fd: int | None = None  # open until the other ranks here have the memory

    def connect(self) -> tuple[Hub | None, _Vote]:
        """Connect to the neighbours; return the hub and this rank's vote."""
        try:
            hub = self._build_hub()
        except _RefusedError as error:
            instead = self._control.model.topology.members(self._group)[error.position]
            return None, _Vote(refused=str(error), instead=instead)
        except OSError as error:
            return None, _Vote(reason=_text_of(error))
        # A rank that is alone on its host needs no arena, and lets the others keep theirs.
        has_arena = hub.arena is not None or len(self._local) == 1
        shares_memory = all(each.mailbox is not None for each in hub.peers.rounds.values())
        return hub, _Vote(shares_memory=shares_memory, has_arena=has_arena)

    def _build_hub(self) -> Hub:
        """Connect to the neighbours; return the hub over these connections."""
        ranks = self._control.model.topology.members(self._group)
        endpoints = self._connect_neighbours()
        # For the longest body that `_inline_bytes` allows, which depends on votes yet to come. The
        # sideband carries only short texts.
        limit_bytes = max(MAILBOX_BYTES, len(ranks) * (_LEAST_INLINE_BYTES + _ENTRY_BYTES))
        rounds, sideband = (
            {
                position: Connection(*ends, limit)
                for (position, kind), ends in endpoints.items()
                if kind == channel
            }
            for channel, limit in ((_ROUNDS, limit_bytes), (_SIDEBAND, 1 << 20))
        )
        channels, steps = (rounds, sideband), self._control.steps
        peers = Peers(ranks, self.position, self._links, channels, self._pids(), steps)
        return Hub(peers, self._arena, self._adverts[self.position].warn_after_s)

    def _pids(self) -> dict[int, int]:
        """Return the pids of other ranks on this host that share its pid namespace."""
        namespace = self._adverts[self.position].pid_namespace
        # Without a namespace, the others' pids have no known meaning here.
        others = [position for position in self._local if position != self.position and namespace]
        shared = [
            position for position in others if self._adverts[position].pid_namespace == namespace
        ]
        return {position: self._adverts[position].pid for position in shared}

    def _connect_neighbours(self) -> dict[tuple[int, int], Endpoint]:
        """Return the connections to all neighbours, by position and channel."""
        endpoints: dict[tuple[int, int], Endpoint] = {}
        try:
            for other in self._called:
                for channel in (_ROUNDS, _SIDEBAND):
                    endpoints[other, channel] = self._call(other, channel)
                if other in self._local:
                    self._receive_arena(endpoints[other, _ROUNDS][0])
            self._make_arena()  # before other ranks are accepted, as `_admit` sends it
            for is_local in (True, False):
                for caller in self._accept_callers(is_local):
                    endpoints.update([caller])
        except BaseException:  # Ctrl-C too: no descriptor is left open
            for sock, _ in endpoints.values():
                sock.close()
            raise
        finally:
            if self._arena_fd is not None:  # the memory lives as long as it is mapped
                os.close(self._arena_fd)
        return endpoints

    def _call(self, other: int, channel: int) -> Endpoint:
        """Connect to a rank, with mutual authentication."""
        address: Any = tuple(self._adverts[other].tcp)
        family, is_local = int(socket.AF_INET), other in self._local
        if is_local:
            family, address = int(socket.AF_UNIX), local_address(self._adverts[other].unix)
        sock = _connect_until(family, address, self._until)
        try:
            if is_local and not (owner := peer(sock)).is_own_user:
                text = f"{owner} is listening at a rank's address but does not belong to this job"
                raise _RefusedError(other, text)
            hello = _HELLO.pack(self.position, channel)
            if not call(sock, self._secret, hello, self._until):
                text = f"the process listening at {address!r} does not belong to this job"
                if not is_local:
                    text += "; if it isn't the other host, set UNISONO_SOCKET_IFNAME"
                raise _RefusedError(other, text)
            if is_local and channel == _ROUNDS:
                return sock, mailbox.receive(sock)  # stands for ACCEPTED
            if receive(sock, len(_ACCEPTED), self._until) != _ACCEPTED:
                raise OSError("refused")
        except BaseException:  # Ctrl-C too: no descriptor is left open
            sock.close()
            raise
        return sock, None

    def _accept_callers(self, is_local: bool) -> Iterator[tuple[tuple[int, int], Endpoint]]:
        """Accept connections of ranks on this host, or of others; reject other processes."""
        callers = [other for other in self._callers if (other in self._local) is is_local]
        expected = {(other, channel) for other in callers for channel in (_ROUNDS, _SIDEBAND)}
        if not expected:
            return
        strangers: set[str] = set()
        admit = partial(self._admit, expected, strangers)
        listener = self._listeners[0 if is_local else 1]
        accepted = accept(listener, admit, strangers, self._until)
        with contextlib.closing(accepted) as arrived:
            for sock, (caller, box) in arrived:
                if caller not in expected:  # a second connection for the same position and channel
                    sock.close()
                    continue
                expected.discard(caller)
                yield caller, (sock, box)
                if not expected:
                    return
        late = sorted({other for other, _ in expected})
        text = f"positions {late} of the group did not connect in time"
        if strangers:
            who = ", ".join(sorted(strangers))
            text += f", and these processes connected but do not belong to this job: {who}"
            raise _RefusedError(late[0], text)
        raise OSError(text)  # not a refusal: the group falls back to the backend's collectives

    def _admit(
        self, expected: Collection[tuple[int, int]], strangers: set[str], sock: socket.socket
    ) -> tuple[tuple[int, int], Mailbox | None] | None:
        """Return position and channel of a rank that proves itself; send it the memory."""
        is_local = sock.family == socket.AF_UNIX
        if not is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = answer(sock, self._secret, _HELLO.size)  # `accept` closes `sock` at the deadline
        if hello is None:
            who = str(peer(sock)) if is_local else f"a process at {sock.getpeername()[0]}"
            strangers.add(f"{who} without the job's secret")
            return None
        position, channel = _HELLO.unpack(hello)
        if (position, channel) not in expected:
            return None
        if not is_local or channel != _ROUNDS:
            sock.sendall(_ACCEPTED)
            return (position, channel), None
        box = mailbox.send(sock)  # before the arena, as the other side receives both
        memory.send(sock, self._arena_fd)
        return (position, channel), box

    def _make_arena(self) -> None:
        """Create the memory for tensors if this rank is the first of several on its host."""
        control = self._control
        # On several hosts it serves `TwoLevels`, which only the group of all ranks uses.
        is_used = len(self.hosts) == 1 or (control.has_levels and self._group is None)
        if is_used and self._local[0] == self.position and len(self._local) > 1:
            max_bytes = min(self._adverts[position].shared_bytes for position in self._local)
            made = arena.make(len(self._local), usable_cores(), max_bytes)
            if made is not None:
                self._arena_fd, self._arena = made

    def _receive_arena(self, sock: socket.socket) -> None:
        """Receive the memory for tensors, if the other rank has made it."""
        try:
            shared = memory.receive(sock)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return  # the memory has arrived, but there is no room to map it
        if shared is not None:
            self._arena = arena.read(shared, len(self._local), self._local.index(self.position))


def _connect_until(family: int, address: Any, until: float) -> socket.socket:
    """Connect; retry while the queue of a local listener is full."""
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, until - time.monotonic()))  # a limit of 0 would mean non-blocking
        try:
            sock.connect(address)
        except BaseException as error:  # Ctrl-C too: no descriptor is left open
            sock.close()
            if not isinstance(error, BlockingIOError) or time.monotonic() >= until:
                raise
            time.sleep(_RETRY_S)
            continue
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
