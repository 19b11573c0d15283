"""At which address of this host the other hosts of a job can reach it."""

from __future__ import annotations

import importlib
import os
import socket
import struct

__all__ = ("own_address",)

_SIOCGIFADDR = 0x8915  # Linux, netdevice(7)
_VARIABLES = ("UNISONO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def own_address() -> str:
    """Choose the address that leaders of other hosts connect to.

    Local. The interface that a variable names comes first (``UNISONO_SOCKET_IFNAME``, gloo's,
    NCCL's); then the address from which ``MASTER_ADDR`` is reached; then that of the host's name.

    Returns:
        An IPv4 address.

    Raises:
        OSError: there is none.
    """
    for variable in _VARIABLES:
        for name in os.environ.get(variable, "").split(","):
            if name and not name.startswith(("^", "=")):
                return _address_of(name)
    master = os.environ.get("MASTER_ADDR")
    if master and master not in ("localhost", "127.0.0.1"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((master, 9))  # sends nothing: the kernel only chooses a route
            return str(sock.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


def _address_of(interface: str) -> str:
    fcntl = importlib.import_module("fcntl")  # not on Windows
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
