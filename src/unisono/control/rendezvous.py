"""Rendezvous: how the ranks of a group find each other for the control plane, over the data plane.

Each rank offers where it can be reached and a random key. All keys together make the secret, which
nobody else knows, and with which both ends of every connection prove that they belong to the group.
The job's own secret goes into it where its ranks were given one. Where they weren't, and the kernel
says that all are processes of one user on one host, they agree on one over those connections, and
then prove themselves on the data plane too, which asks nobody.
Ranks of one host meet at an abstract Unix-domain socket (Linux; elsewhere in a directory of mode
0700), leaders of hosts over TCP. Nothing listens any more once all are connected.
"""

from __future__ import annotations

import contextlib
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
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from unisono.arguments import number_in
from unisono.control.addresses import BACKLOG, bind_widely, listen_locally, local_address, peer
from unisono.control.connection import Connection
from unisono.control.handshake import Provable, accept_authenticated, authenticate
from unisono.control.hub import Hub
from unisono.control.missing import warn_after_s
from unisono.control.signatures import SequenceNumbers
from unisono.control.tree import FAN_OUT, Links, Peers, links
from unisono.deadlines import limit_of
from unisono.errors import CollectiveError, EnvironmentDetectionError, PeerRefusedError
from unisono.host.mailbox import LANE_BYTES, Mailbox, receive, send
from unisono.model import fallback
from unisono.topology import Group, name_of

__all__ = (
    "Met",
    "Advertisement",
    "host_of_this_process",
    "meet",
    "own_offer",
    "refusal_of_host",
    "refuse_wrong",
)

Advertisement = dict[str, Any]


def host_of_this_process() -> str:
    """Name what this process shares with those that it can reach by a Unix-domain socket. Local."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    return f"{socket.gethostname()} {os.getuid() if hasattr(os, 'getuid') else ''}"


def own_offer(host: str | None) -> Advertisement:
    """Say who this process is and what its user has set.

    Local. A variable that is wrong is said too, so that every rank can refuse it.

    Args:
        host: what ranks that share a host have in common; None to find out.

    Returns:
        What JSON can carry; its `reason` is why this process can't be reached, if it can't.
    """
    offer: Advertisement = {
        "host": host_of_this_process() if host is None else host,
        "pid": os.getpid(),
        "user": os.getuid() if hasattr(os, "getuid") else None,
        "pids": _pid_namespace(),
        "reason": "",
        "key": secrets.token_bytes(16).hex(),
    }
    try:
        offer["warn_after_s"] = warn_after_s()
        offer["fan_out"] = int(number_in("UNISONO_FAN_OUT", FAN_OUT, least=1))
        offer["most_bytes"] = int(number_in("UNISONO_INLINE_BYTES", LANE_BYTES))
    except EnvironmentDetectionError as error:
        offer["wrong"] = {
            "message": str(error),
            "source": error.source,
            "variable": error.variable,
            "value": error.value,
        }
    return offer


def refuse_wrong(offers: Iterable[Advertisement], ranks: Sequence[int]) -> None:
    """Raise if a rank said that a variable of its is wrong.

    Local; every rank that has the same offers raises the same.

    Args:
        offers: of all ranks of the group.
        ranks: their global ranks, in the same order.

    Raises:
        EnvironmentDetectionError: the first rank that said so, in its words.
    """
    for rank, offer in zip(ranks, offers, strict=True):
        wrong = offer.get("wrong")
        if wrong is not None:
            wrong["message"] = f"rank {rank}: {wrong['message']}"
            raise EnvironmentDetectionError(**wrong)


def refusal_of_host(
    offers: Sequence[Advertisement], ranks: Sequence[int], place: int
) -> PeerRefusedError:
    """Say which rank of a job of one host is on another one, or another user's. Local."""
    own = offers[place]["host"]
    other = next(at for at, offer in enumerate(offers) if offer["host"] != own)
    if offers[other].get("user") != offers[place]["user"]:
        what = f"a process of user {offers[other].get('user')}"
    else:
        what = "on another host, or in another network namespace"
    return PeerRefusedError(
        f"rank {ranks[place]} refuses rank {ranks[other]}, which is {what}: all ranks of this job "
        "are to be this user's on this host; give MASTER_ADDR an address that isn't the loopback, "
        "and the number of nodes, where that isn't so",
        ranks[other],
    )


def _pid_namespace() -> str:
    """Name what processes share that see each other by the same ids, empty if unknown. Local."""
    with contextlib.suppress(OSError):  # Linux alone has it
        return os.readlink("/proc/self/ns/pid")
    return ""


_log = logging.getLogger(__name__)
_SET_UP_S = 10.0
_RETRY_S = 0.01
_HELLO = struct.Struct("<II16s")
_PROOF_BYTES = 32
_WELCOME = b"!"
_REMEDY_HERE = "let this user's processes meet at Unix-domain sockets"
_REMEDY_BETWEEN = (
    "let the hosts reach each other over TCP; UNISONO_SOCKET_IFNAME names the interface for it"
)
_UNPROVED = "; nothing proves there who belongs to the job"
_MAIN, _ASIDE = 0, 1
Ends = tuple[socket.socket, Mailbox | None]
_ENTRY_BYTES = 64  # what an entry of a round takes besides its blob, and more


class Met(Protocol):
    """What this file needs of a control plane."""

    steps: SequenceNumbers
    secret: bytes | None
    is_one_host: bool
    proved: set[str]
    timeout_s: float | None

    @property
    def model(self) -> Provable:
        """What carries the offers."""


def meet(
    control: Met, group: Group | None, inline_bytes: int, host: str | None = None
) -> Hub | None:
    """Connect the ranks of a group.

    Collective over `group`, in two rounds of the derived exchange; three where hosts differ.

    Args:
        control: what the hub is for; its model carries the offers.
        group: the ranks that meet.
        inline_bytes: longest blob that travels in a round.
        host: what ranks that share a host have in common; None to find out.

    Returns:
        This rank's hub; None on every rank where some rank couldn't be connected.

    Raises:
        EnvironmentDetectionError: some rank's variable isn't a number; on every rank.
        PeerRefusedError: a process that isn't of the job answered for a rank.
    """
    name = name_of(group)
    if control.secret is not None and name not in control.proved:
        authenticate(control.model, group, control.secret, name)
        control.proved.add(name)
    hub, is_one_host = _connect_all(control, group, inline_bytes, host)
    if hub is not None and is_one_host and control.secret is None:
        # The kernel has said of each that it is this user's: what they agree on there is a secret.
        secret = hashlib.sha256(b"".join(hub.exchange(secrets.token_bytes(32), b"", _SET_UP_S)))
        try:
            authenticate(control.model, group, secret.digest(), name)
        except BaseException:  # Ctrl-C too: nobody else has the hub yet
            hub.close()
            raise
        control.proved.add(name)
        if group is None:  # every rank of the context has it, or none has
            control.secret = secret.digest()
    return hub


def _connect_all(
    control: Met, group: Group | None, inline_bytes: int, host: str | None
) -> tuple[Hub | None, bool]:
    """Connect the ranks, and tell whether all are processes of one user on one host."""
    model = control.model
    ranks, place = model.topology.members(group), model.topology.position(group)
    hub = None
    with contextlib.ExitStack() as stack:
        said, listeners = _exchange_offers(model, group, host, stack)
        refuse_wrong(said, ranks)
        is_one_host = len({each["host"] for each in said}) == 1
        if control.is_one_host and not is_one_host and host is None:
            raise refusal_of_host(said, ranks, place)
        if not any(each["reason"] for each in said):
            most_bytes = min(each["most_bytes"] for each in said)
            vote: Advertisement = {"reason": "", "refused": "", "shares_memory": False}
            until = _until(control)
            try:
                near = _connect(said, place, listeners, inline_bytes, until, control.secret)
                hub = Hub(ranks, place, near, said[place]["warn_after_s"], control.steps)
                vote["shares_memory"] = hub.shares_memory
            except _RefusedError as error:
                vote["refused"], vote["instead"] = str(error), ranks[error.place]
            except OSError as error:
                vote["reason"] = _text_of(error)
            said = _vote(model, vote, group, hub)
    reasons = [
        f"rank {r}: {each['reason']}" for r, each in zip(ranks, said, strict=True) if each["reason"]
    ]
    if hub is not None and not reasons:
        if all(each["shares_memory"] for each in said):
            hub.all_share_memory = True
            inline_bytes = max(inline_bytes, LANE_BYTES // len(ranks) - _ENTRY_BYTES)
        else:  # every rank gets the blobs of all
            inline_bytes = min(inline_bytes, LANE_BYTES // len(ranks))
        hub.inline_bytes = min(inline_bytes, most_bytes)
        return hub, is_one_host
    if hub is not None:
        hub.close()
    if place == 0:
        is_proved = control.secret is not None
        remedy = _REMEDY_HERE if is_one_host else _REMEDY_BETWEEN
        _warn_once("; ".join(reasons), remedy, "" if is_proved else _UNPROVED)
    return None, is_one_host


def _until(control: Met) -> float:
    limit_s = limit_of(control.timeout_s)
    return time.monotonic() + (_SET_UP_S if limit_s is None else min(limit_s, _SET_UP_S))


class _RefusedError(OSError):
    """What is there in place of a member isn't one."""

    def __init__(self, place: int, text: str) -> None:
        super().__init__(text)
        self.place = place


def _vote(
    model: Provable, vote: Advertisement, group: Group | None, hub: Hub | None
) -> list[Advertisement]:
    """Tell every rank how this one has fared; if one was refused, every rank raises."""
    try:
        votes = _tell(model, vote, group)
    except CollectiveError as error:
        if hub is not None:
            hub.close()
        if vote["refused"]:  # a stranger in the job need not vote
            raise PeerRefusedError(vote["refused"], vote["instead"]) from error
        raise
    ranks, own = model.topology.members(group), model.topology.rank
    # What this rank saw itself comes first.
    seen = sorted(zip(ranks, votes, strict=True), key=lambda pair: pair[0] != own)
    for rank, each in seen:
        if each["refused"]:
            if hub is not None:
                hub.close()
            raise PeerRefusedError(f"rank {rank}: {each['refused']}", each["instead"])
    return votes


def _exchange_offers(
    model: fallback.CollectiveTransport,
    group: Group | None,
    host: str | None,
    stack: contextlib.ExitStack,
) -> tuple[list[Advertisement], list[socket.socket]]:
    """Tell every rank where every rank can be reached, or why it can't.

    Who leads a host takes a port only where there is another host, and after that is known.
    """
    listeners: list[socket.socket] = []
    offer = own_offer(host)
    try:
        listener, offer["unix"] = listen_locally(stack)
        listeners.append(listener)
    except OSError as error:
        offer["reason"] = _text_of(error)
    offers = _tell(model, offer, group)
    hosts = [each["host"] for each in offers]
    if len(set(hosts)) == 1:
        return offers, listeners
    place = model.topology.position(group)
    if hosts.index(hosts[place]) == place:
        try:
            listener, offer["tcp"] = bind_widely(stack)
            listeners.append(listener)
        except OSError as error:
            offer["reason"] = offer["reason"] or _text_of(error)
    return _tell(model, offer, group), listeners


def _tell(
    model: fallback.CollectiveTransport, offer: Advertisement, group: Group | None
) -> list[Advertisement]:
    blobs = fallback.exchange(model, json.dumps(offer).encode(), group)
    try:
        return [{**json.loads(blob)} for blob in blobs]
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


def _connect(
    offers: list[Advertisement],
    place: int,
    listeners: list[socket.socket],
    inline_bytes: int,
    until: float,
    job_secret: bytes | None,
) -> Peers:
    """Connect upwards first, so that the tree is made from its root down."""
    hosts = [offer["host"] for offer in offers]
    part = links(hosts, place, offers[0]["fan_out"])
    everybody = "".join(offer["key"] for offer in offers).encode()
    secret = hashlib.sha256((job_secret or b"") + everybody).digest()
    made: dict[tuple[int, int], Ends] = {}
    try:
        if any(hosts[down] != hosts[place] for down in part.downs):
            listeners[1].listen(BACKLOG)
        if part.up is not None:
            for use in (_MAIN, _ASIDE):
                made[part.up, use] = _call(offers, place, part.up, use, secret, until)
        made.update(_answer(hosts, place, part, listeners, secret, until))
    except BaseException:  # Ctrl-C too: no descriptor is left open
        for sock, _ in made.values():
            sock.close()
        raise
    pids = _pids(offers, place)
    limit_bytes = max(LANE_BYTES, len(offers) * (inline_bytes + _ENTRY_BYTES))
    return Peers(
        part,
        {at: Connection(*ends, limit_bytes) for (at, use), ends in made.items() if use == _MAIN},
        {at: Connection(*ends, 1 << 20) for (at, use), ends in made.items() if use == _ASIDE},
        pids,
    )


def _pids(offers: list[Advertisement], place: int) -> dict[int, int]:
    """Give the pids of the others on this host, if this process sees its own as it offered it."""
    here = offers[place]["host"]
    return {
        other: int(offer["pid"])
        for other, offer in enumerate(offers)
        if other != place and offer["host"] == here and offer["pids"] == offers[place]["pids"] != ""
    }


def _proof(secret: bytes, side: bytes, nonce: bytes, place: int, use: int) -> bytes:
    return hmac.new(secret, side + struct.pack("<II", place, use) + nonce, "sha256").digest()


def _call(
    offers: list[Advertisement], place: int, up: int, use: int, secret: bytes, until: float
) -> Ends:
    """Connect to the rank above, and let each prove itself to the other."""
    offer = offers[up]
    address: Any
    is_local = offer["host"] == offers[place]["host"]
    if is_local:
        family, address = int(socket.AF_UNIX), local_address(offer["unix"])
    else:
        family, address = int(socket.AF_INET), tuple(offer["tcp"])
    sock = _connect_until(family, address, until)
    try:
        if is_local and not (owner := peer(sock)).is_own_user:
            raise _RefusedError(up, f"{owner} listens in place of a rank: it isn't of this job")
        nonce = secrets.token_bytes(16)
        sock.sendall(_HELLO.pack(place, use, nonce))
        reply = _read(sock, _PROOF_BYTES + 16)
        if not hmac.compare_digest(reply[:_PROOF_BYTES], _proof(secret, b"up", nonce, place, use)):
            raise _RefusedError(up, f"who listens at {address!r} doesn't belong to this job")
        sock.sendall(_proof(secret, b"down", reply[_PROOF_BYTES:], place, use))
        if is_local and use == _MAIN:
            return sock, receive(sock)
        if _read(sock, len(_WELCOME)) != _WELCOME:
            raise OSError("refused")
    except BaseException:  # as above
        sock.close()
        raise
    return sock, None


def _connect_until(family: int, address: Any, until: float) -> socket.socket:
    """Connect; a leader elsewhere may not listen yet, and one here may be asked by many."""
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


def _answer(
    hosts: list[str],
    place: int,
    part: Links,
    listeners: list[socket.socket],
    secret: bytes,
    until: float,
) -> Iterator[tuple[tuple[int, int], Ends]]:
    """Take the connections of those below; strangers are dropped."""
    for is_local in (True, False):
        wanted = {
            (down, use)
            for down in part.downs
            for use in (_MAIN, _ASIDE)
            if (hosts[down] == hosts[place]) is is_local
        }
        if not wanted:
            continue
        strangers: set[str] = set()
        check = partial(
            _check, wanted=wanted, secret=secret, is_local=is_local, refused=strangers.add
        )
        visits = accept_authenticated(listeners[not is_local], check, until, refused=strangers.add)
        with contextlib.closing(visits) as members:
            for sock, (found, lane) in members:
                wanted.discard(found)
                yield found, (sock, lane)
                if not wanted:
                    break
        if wanted:
            late = sorted({down for down, _ in wanted})
            text = f"places {late} of the group didn't connect in time"
            if strangers:
                who = ", ".join(sorted(strangers))
                raise _RefusedError(late[0], f"{text}, and who came isn't of this job: {who}")
            raise OSError(text)


def _check(
    sock: socket.socket,
    wanted: set[tuple[int, int]],
    secret: bytes,
    is_local: bool,
    refused: Callable[[str], None],
) -> Generator[int, bytes, tuple[tuple[int, int], Mailbox | None] | None]:
    if not is_local:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    place, use, nonce = _HELLO.unpack((yield _HELLO.size))
    if (place, use) not in wanted:
        return None
    mine = secrets.token_bytes(16)
    sock.sendall(_proof(secret, b"up", nonce, place, use) + mine)
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(secret, b"down", mine, place, use)):
        who = str(peer(sock)) if is_local else f"a process at {sock.getpeername()[0]}"
        refused(f"{who} without the job's secret")
        return None
    if is_local and use == _MAIN:
        return (place, use), send(sock)
    sock.sendall(_WELCOME)
    return (place, use), None
