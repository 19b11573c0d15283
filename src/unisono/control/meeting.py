"""How the ranks of a group find each other for the control plane, once, over the data plane.

Each rank offers where it can be reached and a random key. All keys together make the secret, which
nobody else knows, and with which both ends of every connection prove that they belong to the group.
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
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from unisono._arguments import number_in
from unisono.control import derived
from unisono.control.addresses import listen_locally, local_address, own_address
from unisono.control.door import visitors
from unisono.control.hub import Hub
from unisono.control.lane import LANE_BYTES, Lane, receive, send
from unisono.control.neighbours import Neighbours
from unisono.control.tree import FAN_OUT, Links, links
from unisono.control.wire import Line
from unisono.topology import Group

__all__ = ("host_of_this_process", "meet")

_log = logging.getLogger(__name__)
_SET_UP_S = 10.0
_WARN_AFTER_S = 30.0
_RETRY_S = 0.01
_HELLO = struct.Struct("<II16s")
_PROOF_BYTES = 32
_WELCOME = b"!"
_SHARING = b"\0"  # the vote of a rank that has a lane to every neighbour
_MAIN, _ASIDE = 0, 1
Ends = tuple[socket.socket, Lane | None]
_ENTRY_BYTES = 64  # what an entry of a round takes besides its blob, and more


def host_of_this_process() -> str:
    """Name what this process shares with those that it can reach by a Unix-domain socket. Local."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    return f"{socket.gethostname()} {os.getuid() if hasattr(os, 'getuid') else ''}"


def meet(
    model: derived.Carrier, group: Group | None, inline_bytes: int, host: str | None = None
) -> Hub | None:
    """Connect the ranks of a group.

    Collective over `group`, in two rounds of the derived exchange.

    Args:
        model: what carries the offers.
        group: the ranks that meet.
        inline_bytes: longest blob that travels in a round.
        host: what ranks that share a host have in common; None to find out.

    Returns:
        This rank's hub; None on every rank where some rank couldn't be connected.
    """
    warn_after_s = number_in("UNISONO_WARN_AFTER_S", _WARN_AFTER_S)
    fan_out = int(number_in("UNISONO_FAN_OUT", FAN_OUT, least=1))
    most_bytes = int(number_in("UNISONO_INLINE_BYTES", LANE_BYTES))
    ranks = model.members(group)
    place = ranks.index(model.topology.rank)
    here = host_of_this_process() if host is None else host
    is_wide = model.topology.nnodes != 1 or host is not None
    with contextlib.ExitStack() as stack:
        key = secrets.token_bytes(16)
        offer: dict[str, Any] = {
            "host": here,
            "pid": os.getpid(),
            "pids": _pid_namespace(),
            "key": key.hex(),
            "most": most_bytes,
        }
        listeners: list[socket.socket] = []
        reason = ""
        try:
            local, offer["unix"] = listen_locally(stack)
            listeners.append(local)
            if is_wide:
                wide = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                wide.bind((own_address(), 0))
                offer["tcp"] = wide.getsockname()
                listeners.append(wide)
        except OSError as error:
            reason = str(error)
        offers = [
            json.loads(blob) for blob in derived.exchange(model, json.dumps(offer).encode(), group)
        ]
        hub = None
        if all("unix" in each for each in offers) and not reason:
            try:
                near = _connect(offers, place, listeners, inline_bytes, fan_out)
                hub = Hub(ranks, place, near, warn_after_s)
            except OSError as error:
                reason = str(error) or type(error).__name__
        vote = b"no socket" if hub is None else _SHARING if hub.shares_memory else b""
        votes = derived.exchange(model, reason.encode() or vote, group)
    if hub is not None and all(vote in (b"", _SHARING) for vote in votes):
        if all(vote == _SHARING for vote in votes):
            inline_bytes = max(inline_bytes, LANE_BYTES // len(ranks) - _ENTRY_BYTES)
        hub.inline_bytes = min(inline_bytes, *(offer["most"] for offer in offers))
        return hub
    if hub is not None:
        hub.close()
    named = [(r, v.decode()) for r, v in zip(ranks, votes, strict=True) if v not in (b"", _SHARING)]
    said = "; ".join(f"rank {rank}: {reason}" for rank, reason in named)
    _log.info("the control plane stays on the model's own collectives: %s", said)
    return None


def _connect(
    offers: list[dict[str, Any]],
    place: int,
    listeners: list[socket.socket],
    inline_bytes: int,
    fan_out: int,
) -> Neighbours:
    """Connect upwards first, so that the tree is made from its root down."""
    hosts = [offer["host"] for offer in offers]
    part = links(hosts, place, fan_out)
    everybody = "".join(offer["key"] for offer in offers).encode()
    secret = hashlib.sha256(everybody).digest()
    until = time.monotonic() + _SET_UP_S
    made: dict[tuple[int, int], Ends] = {}
    try:
        if any(hosts[down] != hosts[place] for down in part.downs):
            listeners[1].listen(128)
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
    return Neighbours(
        part,
        {at: Line(*ends, limit_bytes) for (at, use), ends in made.items() if use == _MAIN},
        {at: Line(*ends, 1 << 20) for (at, use), ends in made.items() if use == _ASIDE},
        pids,
    )


def _pid_namespace() -> str:
    """Name what processes share that see each other by the same ids, empty if unknown. Local."""
    with contextlib.suppress(OSError):  # Linux alone has it
        return os.readlink("/proc/self/ns/pid")
    return ""


def _pids(offers: list[dict[str, Any]], place: int) -> dict[int, int]:
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
    offers: list[dict[str, Any]], place: int, up: int, use: int, secret: bytes, until: float
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
        nonce = secrets.token_bytes(16)
        sock.sendall(_HELLO.pack(place, use, nonce))
        reply = _read(sock, _PROOF_BYTES + 16)
        if not hmac.compare_digest(reply[:_PROOF_BYTES], _proof(secret, b"up", nonce, place, use)):
            raise OSError(f"who listens at {address!r} doesn't belong to this job")
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
    """Connect; a leader elsewhere may not listen yet."""
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, until - time.monotonic()))
        try:
            sock.connect(address)
        except BaseException as error:
            sock.close()
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() >= until:
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
        check = partial(_check, wanted=wanted, secret=secret, is_local=is_local)
        with contextlib.closing(visitors(listeners[not is_local], check, until)) as members:
            for sock, (found, lane) in members:
                wanted.discard(found)
                yield found, (sock, lane)
                if not wanted:
                    break
        if wanted:
            late = sorted({down for down, _ in wanted})
            raise OSError(f"places {late} of the group didn't connect in {_SET_UP_S:g} s")


def _check(
    sock: socket.socket, wanted: set[tuple[int, int]], secret: bytes, is_local: bool
) -> Generator[int, bytes, tuple[tuple[int, int], Lane | None] | None]:
    if not is_local:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    place, use, nonce = _HELLO.unpack((yield _HELLO.size))
    if (place, use) not in wanted:
        return None
    mine = secrets.token_bytes(16)
    sock.sendall(_proof(secret, b"up", nonce, place, use) + mine)
    if not hmac.compare_digest((yield _PROOF_BYTES), _proof(secret, b"down", mine, place, use)):
        return None
    if is_local and use == _MAIN:
        return (place, use), send(sock)
    sock.sendall(_WELCOME)
    return (place, use), None
