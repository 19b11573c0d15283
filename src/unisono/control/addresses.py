"""Listening addresses of this process, and the credentials of peers that connect."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import secrets
import shutil
import socket
import struct
import sys
import tempfile
from dataclasses import dataclass

from unisono.plugins import load

BACKLOG = 4096
"""Connections that may wait at a listener, if the kernel allows so many."""
LOOPBACK = "127.0.0.1"
_KEEP_ALIVE_S = 60
_ANSWER_S = 5.0
_ELSEWHERE = "192.0.2.1"  # of no host (RFC 5737), so the default route leads to it
_REMEDY = "set UNISONO_SOCKET_IFNAME to the interface that the other hosts reach"
_VARIABLES = ("UNISONO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def own_address(master_addr: str | None = None, *, has_others: bool = True) -> str:
    """Return the address at which other hosts reach this one."""
    # First the interface that a variable names (``UNISONO_SOCKET_IFNAME``, gloo's, NCCL's), then
    # the address from which ``MASTER_ADDR`` is reached. If this is the loopback, as it may be on
    # the first host, the address of the host's name is next, then that of the default route.
    for variable in _VARIABLES:
        for name in os.environ.get(variable, "").split(","):
            # NCCL's lists that exclude (^) or match exactly (=) aren't supported.
            if name and not name.startswith(("^", "=")):
                return _address_of(name)
    first, reasons = master_addr or os.environ.get("MASTER_ADDR"), []
    # Unless other hosts are known to exist, only MASTER_ADDR can lead to one.
    others = (socket.gethostname(), _ELSEWHERE) if has_others else ()
    for host in filter(None, (first, *others)):
        try:
            address = _address_to(host)
        except OSError as error:
            reasons.append(f"{host}: {error}")
            continue
        if not is_loopback(address):
            return address
        reasons.append(f"other hosts can't reach {address}, the address of {host} here")
    raise OSError(f"no address of this host is known ({', '.join(reasons)}); {_REMEDY}")


def own_interface(master_addr: str | None, *, has_others: bool) -> str:
    """Return the name of the interface of `own_address`; empty if there is none."""
    with contextlib.suppress(OSError):
        address = own_address(master_addr, has_others=has_others)
        for name, found in load("psutil:net_if_addrs")().items():
            if address in [each.address for each in found]:
                return str(name)
    return ""


def _address_to(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((host, 9))  # sends nothing: the kernel only chooses a route
        return str(sock.getsockname()[0])


def _address_of(interface: str) -> str:
    for each in load("psutil:net_if_addrs")().get(interface, ()):
        if each.family == socket.AF_INET:
            return str(each.address)
    raise OSError(f"this host has no interface {interface} with an IPv4 address; {_REMEDY}")


def listen_widely(stack: contextlib.ExitStack) -> tuple[socket.socket, tuple[str, int]]:
    """Open a TCP port for leaders of other hosts."""
    sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    sock.bind((own_address(), 0))
    sock.listen(BACKLOG)
    host, port = sock.getsockname()
    return sock, (host, port)


def listen_locally(stack: contextlib.ExitStack) -> tuple[socket.socket, str]:
    """Open a Unix-domain socket for this user's processes."""
    # On Linux its name is abstract, so that no file is left; elsewhere it is in a directory
    # of mode 0700.
    if not hasattr(socket, "AF_UNIX"):
        raise OSError("no Unix-domain sockets here")
    sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    name = f"unisono-{secrets.token_hex(12)}"
    if sys.platform == "linux":
        address = f"@{name}"
        sock.bind(f"\0{name}")
    else:
        folder = tempfile.mkdtemp(prefix="unisono-")  # mode 0700
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        address = f"{folder}/s"
        sock.bind(address)
    sock.listen(BACKLOG)
    return sock, address


def local_address(text: str) -> str:
    """Return a Unix-domain address in the form that ``connect`` accepts."""
    return text.replace("@", "\0", 1)


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix-domain socket."""

    pid: int | None
    is_own_user: bool
    uid: int | None = None

    def __str__(self) -> str:
        return f"a process of user {self.uid}" + ("" if self.pid is None else f" (pid {self.pid})")


def peer(sock: socket.socket) -> Peer:
    """Return the peer's process and user."""
    if not hasattr(socket, "SO_PEERCRED"):
        return Peer(None, True)  # the socket's folder keeps other users out
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return Peer(pid or None, uid == os.getuid(), uid)  # 0: the peer is in another pid namespace


def is_loopback(addr: str) -> bool:
    """Return whether an address is a loopback address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(addr).is_loopback
    return addr == "localhost"


def listen_for_ranks(addr: str, port: int, *, is_one_host: bool) -> tuple[socket.socket, str]:
    """Return a listener that a job's ranks can reach, and its address on this host."""
    # It listens at every address if `addr` stands here for one that other hosts can't reach.
    if is_one_host:
        return listen_on_host(addr, port), addr
    try:
        listener = listen(addr, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:  # with this one, NAT translates `addr` to this host
            raise
    else:
        if not is_loopback(listener.getsockname()[0]):
            return listener, addr
        listener.close()
    return listen("", port), LOOPBACK


def listen_on_host(addr: str, port: int) -> socket.socket:
    """Return a listener for ranks of this host; raise OSError if they couldn't connect to it."""
    listener = listen(addr, port)
    if (reason := why_unreachable(addr, listener.getsockname()[1], _ANSWER_S)) is not None:
        listener.close()  # torch would try for five minutes
        raise OSError(
            f"no process of this host can connect to {addr}: {reason}. The interface is down, "
            "as in a new network namespace: ip link set lo up"
        )
    return listener


def keep_alive(sock: socket.socket) -> None:
    """Set keep-alive on a TCP connection that may be silent for hours."""
    # So firewalls don't forget it, and a host that is gone is noticed.
    if sock.family != getattr(socket, "AF_UNIX", None):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)


def why_unreachable(addr: str, port: int, limit_s: float) -> OSError | None:
    """Return the error of connecting to an address; None if that succeeds."""
    try:
        socket.create_connection((addr, port), limit_s).close()
    except OSError as error:
        return error
    return None


def listen(addr: str, port: int) -> socket.socket:
    """Return a listener at one address of this host; at all of them if `addr` is empty."""
    if not addr and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    infos = socket.getaddrinfo(addr or "0.0.0.0", port, type=socket.SOCK_STREAM)
    return socket.create_server(infos[0][4], family=infos[0][0], backlog=BACKLOG)
