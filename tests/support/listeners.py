"""The listening sockets of this process and its descendants, from the kernel's tables."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil

_LISTENS = "00010000"  # the flag of a listening socket in Linux's /proc/net/unix


def ours() -> list[Any]:
    """List this process and its descendants."""
    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def listeners() -> list[Any]:
    """List the addresses at which these processes listen."""
    return [
        connection.laddr
        for process in ours()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def listening_unix_sockets() -> list[str]:
    """List the Unix-domain sockets at which these processes listen."""
    inodes = set()
    for process in ours():
        with contextlib.suppress(OSError):  # the process has ended
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [" ".join(row) for row in table if row[3] == _LISTENS and row[6] in inodes]
