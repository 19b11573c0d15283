"""The server that forks the ranks of a script, and the processes that it forks."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unisono.launchers.job.forkserver import Forked
from unisono.launchers.job.output import Pipes, show
from unisono.launchers.script.script import Script
from unisono.launchers.variables import LINK

_HOOK = str(Path(__file__).with_name("hook"))
# With these, tools begin or print as an interpreter starts, which a fork doesn't do again.
_OF_TOOLS = (
    *("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE", "LD_PRELOAD"),
    *("CUDA_INJECTION64_PATH", "PYTHONPROFILEIMPORTTIME", "PYTHONVERBOSE", "PYTHONPERFSUPPORT"),
)


def why_fresh(script: Script) -> str:
    """Return why each rank of a script is to be a new interpreter; empty if it may be a fork."""
    # These reasons are known before the server starts; it adds its own, see `why_unusable`.
    if script.is_fresh:
        return "--fresh"
    if sys.platform != "linux":
        return "this isn't Linux with glibc"
    if script.program[:1] != (sys.executable,):
        return "it isn't a script of this Python"
    if script.stdin_rank is not None:
        return "--stdin gives a rank the terminal"
    flags = sys.flags
    if flags.isolated or flags.ignore_environment or flags.no_site or sys.gettrace():
        return "this Python has other flags, or a debugger"
    tool = next((name for name in _OF_TOOLS if os.environ.get(name)), "")
    return f"{tool} is set" if tool else ""


def fork(control: socket.socket, message: Mapping[str, Any], stdio: Sequence[int]) -> Forked:
    """Fork a process of a server with these three streams; raise OSError if that fails."""
    channel, their_channel = socket.socketpair()
    status, their_status = socket.socketpair()
    with channel:
        with their_channel, their_status:
            fds = [*stdio, their_channel.fileno(), their_status.fileno()]
            socket.send_fds(control, [b"."], fds)
        channel.sendall(json.dumps(message).encode())
        channel.shutdown(socket.SHUT_WR)
        channel.recv(1)  # returns once the fork has closed its end: it has a group of its own
    forked = Forked(status)
    forked.read_status(0)
    if not forked.pid:
        raise OSError("the fork server has ended, or can't fork")
    return forked


class ForkServer:
    """An interpreter that imports torch, and forks the ranks of a script: see `hook`."""

    control: socket.socket
    """The server's control socket, for `fork`."""

    def __init__(self, program: Sequence[str], environ: Mapping[str, str]) -> None:
        self.control, theirs = socket.socketpair()
        # The folder that the script can import from; none for an archive.
        file = Path.cwd() if program[1] == "-m" else Path(program[1]).resolve()
        folder = "" if file.suffix == ".pyz" else str(file if file.is_dir() else file.parent)
        link = {"control": theirs.fileno(), "beside": folder}
        path = os.pathsep.join(filter(None, (_HOOK, environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                program,
                env={**environ, LINK: json.dumps(link), "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as the ranks' streams, which are made as Python starts
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                bufsize=0,
            )
        self._answers: list[bytes] = []

    @classmethod
    def of(cls, script: Script, environ: Mapping[str, str], held: ExitStack) -> ForkServer | None:
        """Start the server of a script's ranks; return None if each is to be a new interpreter."""
        with contextlib.suppress(OSError):  # starting a rank will fail, too, and say so
            if not why_fresh(script):
                server = cls(script.program, {"PYTHONUNBUFFERED": "1", **environ})
                held.callback(server.end)
                return server
        return None

    def why_unusable(self) -> str:
        """Wait until torch is imported; return why forks wouldn't be like new interpreters."""
        if not self._answers:
            pipes = Pipes()
            pipes.add(self._process)
            pipes.wake(self.control, lambda: self._answers.append(self.control.recv(4096)))
            lines = []
            while not self._answers:
                lines += pipes.read(1.0)
            for target, line in [*lines, *pipes.read(0.0), *pipes.rests()]:
                show(target, line)
            pipes.close()
        answer = self._answers[0].decode()
        return "" if answer == "ready" else answer or "importing torch has failed"

    def end(self) -> None:
        """End the server; the kernel ends with it what it has forked."""
        self.control.close()
        self._process.kill()
        atexit.register(self._process.wait)  # later, as freeing its memory takes 20 ms
