"""Ranks of a script as processes of this host, without a launcher of somebody else's."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

from unisono.errors import LaunchError
from unisono.launchers._front import Front, Outcome, start
from unisono.launchers._private import private_store
from unisono.launchers._script import Script, env_for, without_job
from unisono.launchers._store import host
from unisono.topology import RankInfo

__all__ = ("infos", "run")

_log = logging.getLogger(__name__)
# Else gloo listens at the address of the host's name; ours does so without, a plain script doesn't.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
_SEVERAL = "use launcher 'torchrun' for several nodes, or 'slurm', 'mpi' or 'ray'"


def infos(script: Script, master_addr: str, master_port: int) -> list[RankInfo]:
    """Say who the ranks of this host are.

    Local, and pure.

    Args:
        script: what was asked for.
        master_addr: host of the store that listens already.
        master_port: its port.

    Returns:
        The facts of each, as its environment will say them.
    """
    plan = replace(script.plan(), master_addr=master_addr, master_port=master_port)
    return [
        replace(plan.info(local_rank), source="torchrun", store_is_hosted=True)
        for local_rank in range(script.nproc_per_node)
    ]


def run(script: Script, environ: Mapping[str, str] | None = None) -> Outcome:
    """Run a script in processes of this host, again after a failure where that was asked for.

    Local. The store listens on the loopback at a port of the kernel's choice, and is a new one
    after each failure.

    Args:
        script: what was asked for.
        environ: variables of the ranks; None for this process's own.

    Returns:
        How the last attempt ended.

    Raises:
        ArgumentError: several nodes were asked for.
        LaunchError: the rendezvous or a process can't be made.
    """
    script.require_one_node("processes", _SEVERAL)
    base = {**_LOOPBACK, **without_job(os.environ if environ is None else environ)}
    for attempt in range(script.max_restarts + 1):
        outcome = _attempt(script, base, attempt)
        if outcome.code == 0 or outcome.interrupted is not None:
            return outcome
        if attempt < script.max_restarts:
            who = outcome.failed.headline if outcome.failed else f"exit code {outcome.code}"
            _log.warning("restart %d of %d: %s", attempt + 1, script.max_restarts, who)
    return outcome


def _attempt(script: Script, base: Mapping[str, str], attempt: int) -> Outcome:
    with ExitStack() as held:
        return _run_once(script, {**base, **private_store(held)}, attempt)


def _run_once(script: Script, base: Mapping[str, str], attempt: int) -> Outcome:
    store, plan = host(script.plan())
    assert plan.master_addr is not None
    assert plan.master_port is not None
    ranks = infos(script, plan.master_addr, plan.master_port)
    front = Front(script.token, infos=ranks)
    with _terminal(script.stdin_rank) as lent:
        try:
            for info in ranks:
                own = env_for(info, attempt, script.max_restarts)
                if script.stdin_rank not in (None, info.rank):
                    own["PYTHONBREAKPOINT"] = "0"  # nobody could answer there
                terminal = lent if script.stdin_rank == info.rank else ()
                words = script.rank_argv(os.getpid(), terminal)
                front.processes.append(start(words, {**base, **own}, terminal))
        except LaunchError:
            front.end()
            raise
        outcome = front.run()
    del store  # it outlives every rank
    return outcome


@contextlib.contextmanager
def _terminal(rank: int | None) -> Iterator[tuple[int, ...]]:
    """Lend one rank this process's stdout and stderr; its terminal is then set as it was."""
    if rank is None:
        yield ()
        return
    lent = os.dup(1), os.dup(2)
    before = termios.tcgetattr(0) if os.isatty(0) else None
    try:
        yield lent
    finally:
        for fd in lent:
            os.close(fd)
        if before is not None:
            with contextlib.suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(0, termios.TCSADRAIN, before)
