"""A rank that another library's launcher has made: it connects to the process that launched it.

The process that the launcher made looks after a child of its own, which is the worker, and tells on
its status socket what becomes of it, as the process does that makes local workers. It imports no
torch. When the process that launched the job ends, the connections close, and the rank ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import resource
import signal
import socket
from collections.abc import Sequence
from typing import NoReturn

from unisono.control.handshake import call
from unisono.launchers.job import channel as messages
from unisono.launchers.job.forkserver import attend, die_with

_BOOT = """\
import sys; sys.path[:] = {path!r}
from unisono.launchers.job.wrapper import join; channel, parent = join({link!r})
from unisono.launchers.job.worker import work; work(channel, parent)"""


def boot(path: list[str], link: str) -> str:
    """Write the program of a rank."""
    return _BOOT.format(path=path, link=link)


def link_to(
    where: str | int, token: str, variables: Sequence[tuple[str, str]], host: str = ""
) -> str:
    """Write down where a rank connects, and how it knows who it is."""
    return json.dumps([where, token, variables, host])


def join(link: str) -> tuple[int, int]:
    """Connect to the process that launched the job, and be a worker in a child of this process."""
    # It returns in the child alone; this process ends as the child does.
    where, token, variables, host = json.loads(link)
    parent = os.getppid()
    die_with(parent)
    hello = pickle.dumps((*_who_am_i(variables), dict(os.environ)))
    try:
        channel = _connect(where, os.environ.get(host, ""), token, b"c", hello)
        status = _connect(where, os.environ.get(host, ""), token, b"s", hello)
    except OSError:  # that process is gone
        os._exit(1)
    own = os.getpid()
    pid = os.fork()
    if pid == 0:
        status.close()
        return channel.detach(), own
    channel.close()
    end_like(os.waitstatus_to_exitcode(attend(status, pid, parent)))


def _who_am_i(variables: Sequence[tuple[str, str]]) -> tuple[int | None, int | None]:
    for rank_name, size_name in variables:
        rank, size = os.environ.get(rank_name, ""), os.environ.get(size_name, "")
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size)
    return None, None


def _connect(where: str | int, host: str, token: str, kind: bytes, hello: bytes) -> socket.socket:
    if isinstance(where, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where)
    else:
        sock = socket.create_connection((host, where))
    if not call(sock, token.encode(), kind, math.inf):
        sock.close()
        raise RuntimeError(f"another process listens in place of the launcher at {where}")
    messages.send(sock, messages.TASK, hello)
    return sock


def end_like(code: int) -> NoReturn:
    """End this process as another one has ended: with its exit code, or by its signal."""
    if code < 0:  # so that the launcher sees the signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
