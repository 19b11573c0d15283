"""Listening for the ranks of a job where the user said, and nowhere else."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

__all__ = ("is_loopback", "listen_at", "listen_everywhere", "listen_for_others")


def is_loopback(addr: str) -> bool:
    """Tell whether an address is of the loopback. Local."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(addr).is_loopback
    return addr == "localhost"


def listen_for_others(addr: str, port: int) -> socket.socket | None:
    """Listen at one address for other hosts, if they can reach this one by it.

    Local.

    Args:
        addr: the name or address that the others have.
        port: 0 for one of the kernel's choice.

    Returns:
        None where it is another one for the others, as in a hosts file that maps a host's own name
        to the loopback, or isn't an address of this host at all, as behind a translation.

    Raises:
        OSError: it doesn't resolve, or the port is taken.
    """
    try:
        listener = listen_at(addr, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    if is_loopback(listener.getsockname()[0]):
        listener.close()
        return None
    return listener


def listen_everywhere(port: int) -> socket.socket:
    """Listen at every address of this host.

    Local.

    Args:
        port: 0 for one of the kernel's choice.

    Raises:
        OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=1024)


def listen_at(addr: str, port: int) -> socket.socket:
    """Listen at one address of this host.

    Local.

    Args:
        addr: the host's name or address.
        port: 0 for one of the kernel's choice.

    Raises:
        OSError: it doesn't resolve, isn't this host's, or the port is taken.
    """
    found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    family, kind, proto, _, where = found[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener
