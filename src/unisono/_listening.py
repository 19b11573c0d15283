"""Listening for the ranks of a job where the user said, and nowhere else."""

from __future__ import annotations

import socket

__all__ = ("listen_at",)


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
