"""Which connections of this process lead to processes of other users, as the kernel says."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ("strangers",)

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def strangers() -> str:
    """Name the processes of other users of this host that are connected to this one.

    Local. Linux alone tells. The process's id is known only to who may look at it.

    Returns:
        What can follow a sentence; empty where there is none, or none can be found.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        mine = set(_inodes("self"))
        rows = [row for table in _TABLES for row in _rows(table)]
        ends = {remote: local for local, remote, _, inode in rows if inode in mine}
        found = {
            (uid, inode)
            for local, remote, uid, inode in rows
            if ends.get(local) == remote and uid != os.getuid()
        }
        if found:
            who = ", ".join(sorted(f"user {uid}{_process(inode)}" for uid, inode in found))
            return f"; a process of another user is connected to this one: {who}"
    return ""


def _rows(table: str) -> Iterator[tuple[str, str, int, str]]:
    """Give local and remote address, user and inode of each connection."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            yield words[1], words[2], int(words[7]), words[9]


def _inodes(pid: str) -> Iterator[str]:
    for file in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/{pid}/fd/{file}")
            if name.startswith("socket:["):
                yield name[8:-1]


def _process(inode: str) -> str:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if inode in _inodes(pid):
                return f" (pid {pid})"
    return ""
