"""The ranks of a script as processes of this host."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from unisono.errors import ArgumentError, LaunchError
from unisono.launchers.job.forkserver import Fork, die_with
from unisono.launchers.script.forks import ForkServer, fork
from unisono.launchers.script.script import Script, env_for
from unisono.launchers.variables import OF_TORCH, share_of_cores, without

if TYPE_CHECKING:
    from unisono.launchers.script.supervisor import ScriptOutcome

# Without it, gloo in a script that doesn't use unisono listens at the address of the host's name.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def run(script: Script) -> ScriptOutcome:
    """Run a script in processes of this host, and again after a failure up to `max_restarts`."""
    if script.nnodes > 1 or script.max_nnodes > 1 or len(script.hosts) > 1:
        raise ArgumentError(
            "launcher 'processes' starts ranks on this host alone: use launcher 'torchrun' for "
            "several nodes, or 'slurm', 'mpi' or 'ray'"
        )
    base = {**_LOOPBACK, **without(os.environ, OF_TORCH)}  # the user's variables have priority
    with ExitStack() as held:
        # What all ranks have in common: libraries read some of it while they are loaded.
        shared = {**share_of_cores(script.plan().info(0)), **base}
        server = ForkServer.of(script, shared, held)
        # All that isn't needed before is imported while the server imports torch.
        from unisono.launchers.script.supervisor import restart

        for attempt in range(script.max_restarts + 1):
            outcome = _attempt(script, base, attempt, server)
            if outcome.code == 0 or outcome.interrupted is not None:  # a signal ends the whole job
                return outcome
            if attempt < script.max_restarts:
                restart(outcome, attempt + 1, script.max_restarts)
    return outcome


def _attempt(
    script: Script, base: Mapping[str, str], attempt: int, server: ForkServer | None
) -> ScriptOutcome:
    """Run the script once, with a store for this attempt that outlives every rank."""
    from unisono.launchers.job.store import hold
    from unisono.launchers.script.rank.program import run_rank
    from unisono.launchers.script.supervisor import Supervisor

    control = None if server is None or server.why_unusable() else server.control
    with ExitStack() as held, _terminal(script.stdin_rank) as lent:
        try:
            plan = hold(script.plan(), held, partial(_host_store, control))
            ranks = [plan.info(local_rank) for local_rank in range(script.nproc_per_node)]
            supervisor = Supervisor(script, ranks)
            held.callback(supervisor.kill)
            for info in ranks:
                environ = {**base, **env_for(info, attempt, script.max_restarts)}
                if script.stdin_rank not in (None, info.rank):
                    environ["PYTHONBREAKPOINT"] = "0"  # this rank has no stdin
                terminal = lent if script.stdin_rank == info.rank else ()
                run = partial(run_rank, os.getpid(), script.program, server=control)
                wrap = partial(_wrap, run, environ, script.rank_options(terminal), control)
                stdin = None if terminal else subprocess.DEVNULL
                pipe = subprocess.PIPE
                supervisor.add(Fork(wrap, stdin=stdin, stdout=pipe, stderr=pipe, bufsize=0))
        except OSError as error:
            raise LaunchError(f"a rank can't be started: {error}") from error
        return supervisor.run()


def _host_store(
    server: socket.socket | None, held: ExitStack, addr: str, port: int, _is_one_host: bool
) -> int:
    """Host the rendezvous in another process, so that this one needs no torch; return its port."""
    from unisono.control.addresses import listen_on_host

    with listen_on_host(addr, port) as listener:
        where = addr, int(listener.getsockname()[1])
        try:
            if server is not None:
                host_status = fork(server, {"store": where}, [listener.fileno(), 1, 2]).status
                held.callback(host_status.close)  # which ends it
            else:
                host = Fork(partial(_host_here, os.getpid(), where), stdin=listener.fileno())
                held.enter_context(host)
                held.callback(host.kill)
        except OSError as error:  # not one of the address: see `hold`
            raise LaunchError(f"a rank can't be started: {error}") from error
    return where[1]


def _host_here(parent: int, where: tuple[str, int]) -> NoReturn:
    """Host the rendezvous in this fork, until its parent ends."""
    die_with(parent)
    os.setsid()
    from unisono.control.stores import host_forever  # which imports torch

    host_forever(*where)


def _wrap(
    run: Callable[..., NoReturn],
    environ: Mapping[str, str],
    options: Mapping[str, Any],
    server: socket.socket | None,
) -> None:
    """Run one rank in this fork, as its wrapper: see `rank`."""
    kept = {*options.get("terminal", ()), *([server.fileno()] if server else [])}
    for fd in [int(name) for name in os.listdir("/dev/fd")]:
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(fd)
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    run(options)


@contextlib.contextmanager
def _terminal(rank: int | None) -> Iterator[tuple[int, ...]]:
    """Yield copies of stdout and stderr for one rank; restore the terminal's mode afterwards."""
    if rank is None:
        yield ()
        return
    # The rank inherits the copies under their numbers, as 1 and 2 of its wrapper are pipes.
    lent = os.dup(1), os.dup(2)
    # A rank that is killed while it reads may leave the terminal in another mode.
    before = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield lent
    finally:
        for fd in lent:
            os.close(fd)
        if before is not None:
            with contextlib.suppress(termios.error):  # the terminal may be closed
                termios.tcsetattr(0, termios.TCSADRAIN, before)
