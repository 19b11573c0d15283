"""A rank that another library's launcher starts, connected to the process that launched the job.

The launcher's process supervises its child, the worker, and reports the worker's state on a status
socket, as the fork server does for local workers. It imports no torch. When the process that
launched the job ends, the connections close, and the rank ends.
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
import sys
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NoReturn

from unisono.control.addresses import keep_alive, local_address, peer
from unisono.control.handshake import call
from unisono.errors import UnisonoError
from unisono.launchers.job import channel as messages
from unisono.launchers.job.failure import exit_code_of
from unisono.launchers.job.forkserver import die_with, interpreter, supervise
from unisono.launchers.job.process_state import search_path
from unisono.launchers.variables import LINK, share_of_cores
from unisono.plugins import read_environment
from unisono.topology import RankInfo

_WORK = """\
from unisono.launchers.job.wrapper import join; channel, parent = join()
from unisono.launchers.job.worker import work; work(channel, parent)"""


def boot(work: str = _WORK) -> tuple[str, ...]:
    """Return the command with which a launcher starts a rank."""
    return (*interpreter(), "-c", f"import sys; sys.path[:] = {search_path()!r}\n{work}")


@dataclass(frozen=True, slots=True)
class Link:
    """The address for a rank's connections, which its launcher passes as a variable."""

    where: str | int  # the address of a Unix-domain socket of this host, or a port
    token: str = ""
    host: str = ""  # the launcher's own variable with the host of the port
    names: Sequence[str] = ()  # its variables of rank and sizes, if unisono can't detect them

    def variables(self) -> dict[str, str]:
        """Return the link as a variable for ranks."""
        return {LINK: json.dumps(astuple(self))}

    @classmethod
    def taken(cls) -> Link:
        """Read the link, and remove its variable, which the rank's children would inherit."""
        if LINK not in os.environ:
            sys.exit(f"variable {LINK} is missing: the launcher did not pass it")
        return cls(*json.loads(os.environ.pop(LINK)))

    def connect(self, kind: bytes, who: RankInfo | str | None) -> socket.socket:
        """Connect and identify this rank; `kind` is ``c`` for a channel, ``s`` for a status."""
        hello = pickle.dumps((who, dict(os.environ), os.getpid(), threading.get_ident()))
        if isinstance(self.where, str):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(local_address(self.where))
            is_trusted = peer(sock).is_own_user
        else:
            # Over TCP, `call` checks the token instead.
            sock, is_trusted = socket.create_connection((os.environ[self.host], self.where)), True
            keep_alive(sock)
        if not is_trusted or not call(sock, self.token.encode(), kind, math.inf):
            sock.close()
            raise OSError("another process listens there")
        messages.send(sock, messages.TASK, hello)
        return sock

    def __str__(self) -> str:
        host = os.environ.get(self.host)
        return f"{host}:{self.where}" if self.host else f"{self.where}"


def join() -> tuple[int, int]:
    """Connect to the process that launched the job, and fork a worker; only the worker returns."""
    parent = os.getppid()
    die_with(parent)
    link = Link.taken()
    who = _who_am_i(link.names)
    if isinstance(who, RankInfo):
        os.environ.update({**share_of_cores(who), **os.environ})  # set variables have priority
    try:
        channel, status = link.connect(b"c", who), link.connect(b"s", who)
    except OSError as error:
        rank = who.rank if isinstance(who, RankInfo) else "?"
        sys.exit(f"rank {rank} can't reach the process that launched it at {link}: {error}")
    wrapper = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # a group for `guard`, as the launcher's has other processes
        status.close()  # this copy would hide the supervisor's end
        return channel.detach(), wrapper
    channel.close()  # this copy would hide the worker's end
    end_like(os.waitstatus_to_exitcode(supervise(status, pid, parent)))


def _who_am_i(names: Sequence[str]) -> RankInfo | str | None:
    """Return this process's rank, None if it has none, or why it can't be read."""
    if names:
        rank, world_size, local_rank, local_size = (int(os.environ[name]) for name in names)
        return RankInfo(rank, world_size, local_rank, local_size, source="spawn")
    try:
        return read_environment(os.environ)
    except UnisonoError as error:
        return str(error)


def end_like(code: int) -> NoReturn:
    """Exit as another process has: with its exit code, or by its signal."""
    if code < 0:  # so that the launcher sees the signal
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no second core dump
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(exit_code_of(code))
