"""Replicas that horovodrun makes with its gloo controller, on this host or over ssh.

Horovodrun is a process of its own: it replaces signal handlers, prints, and leaves servers behind.
Functions and results don't travel through Horovod's store, which takes pickles from anybody on the
network. Each rank connects to a socket of ours, in a private directory where all are on this host,
and then is a worker like those of other launchers. When this process ends, however it does, the
connections close, and the ranks end with them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from unisono.control.addresses import listen
from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import ArgumentError, LaunchError
from unisono.launchers.horovod.output import Lines
from unisono.launchers.job.connected import ConnectedWorkers, listen_privately
from unisono.launchers.job.forkserver import interpreter
from unisono.launchers.job.job import Job
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.tail import Tail
from unisono.launchers.job.wrapper import boot, link_to
from unisono.launchers.variables import (
    OF_HOROVOD,
    OF_MPI,
    OF_TORCH,
    RANKS_OF_HOROVOD,
    without,
)
from unisono.topology import LaunchPlan, RankInfo

_DRIVER = """
import os, sys, threading
sys.path[:] = {path!r}
def end_with_parent():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
from horovod.runner.launch import run_commandline
run_commandline()
"""
_HOST = re.compile(r"([\w.-]+):([1-9][0-9]*)")
# Horovodrun's own address, which it made sure that every host can reach.
_HOST_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_RESOLVE_S = 5.0
_EXIT_S = 10.0  # for what ranks still print, after all results have come
_KILL_S = 15.0  # horovodrun's helpers give ranks 5 s to end, twice
_END_S = 5.0  # for horovodrun's end, after that of its output


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    hosts: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Run `entry` in ranks of a Horovod job."""
    if use_gloo is False:
        raise ArgumentError("use_gloo=False: ranks are started over gloo; start others by mpirun")
    slots = _slots(plan, hosts)
    _resolve(list(slots))
    pickled = pickle_for_worker(entry)
    is_local = set(slots) <= {"localhost", "127.0.0.1"}
    token = "" if is_local else secrets.token_hex(16)  # a folder of mode 0700 needs none
    infos = _infos(slots)
    with ExitStack() as held:
        listener, where = _listen(is_local, len(infos), held)
        link = link_to(where, token, RANKS_OF_HOROVOD, _HOST_VARIABLE)
        driver = _start(slots, link, environ or {}, is_verbose=bool(verbose))
        ranks = _Ranks(driver, bool(verbose), infos, pickled, listener, held, stop_limit_s, token)
        job: Job[Any] = Job(ranks, len(infos), grace_s=plan.grace_s or None)
        try:
            return job.join()
        finally:
            job.terminate()


class _Ranks(ConnectedWorkers):
    """Ranks of one horovodrun."""

    def __init__(self, driver: subprocess.Popen[bytes], is_verbose: bool, *args: Any) -> None:
        super().__init__(*args)
        self._driver = driver
        self._lines = Lines(is_verbose)
        self._tails = [Tail(pipe, self._lines.taker()) for pipe in (driver.stdout, driver.stderr)]

    def ended_early(self) -> LaunchError | None:
        """Say why, where horovodrun has ended."""
        if not all(tail.has_ended(0.0) for tail in self._tails):
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(_END_S)
        notes = "\n".join(self._lines.notes)
        code = self._driver.returncode
        return LaunchError(f"horovodrun ended with exit code {code} too early:\n{notes}")

    def doubt(self, rank: int) -> int:
        """Doubt that a rank aborted by itself."""
        # Horovod aborts a process whose peer is lost while it has groups.
        status = next(worker.wait_status for worker in self.workers if worker.rank == rank)
        return int(status is None or os.waitstatus_to_exitcode(status) == -signal.SIGABRT)

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Say how a rank ended, and what it said last."""
        error = super().lost(job, rank)
        last_lines = "\n".join(self._lines.last_of(rank))
        if not last_lines:
            return error
        text, *facts = error.args
        return type(error)(f"{text}; its last words:\n{last_lines}", *facts)

    def see_out(self, job: Job[Any]) -> None:
        """Wait for the end of the ranks, and of what they print."""
        super().see_out(job)
        self._drain(_EXIT_S)

    def end(self, job: Job[Any]) -> None:
        """End all ranks and horovodrun, within seconds."""
        self._lines.is_ending = True
        super().end(job)
        self._driver.kill()
        self._drain(_KILL_S)  # until its helpers, which hold the other ends, have ended too
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(_END_S)
        if self._driver.stdin is not None:
            self._driver.stdin.close()

    def _drain(self, limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        for tail in self._tails:
            tail.has_ended(max(0.0, limit - time.monotonic()))


def _slots(plan: LaunchPlan, hosts: str | None) -> dict[str, int]:
    for name in ("init_method", "start_method"):
        if getattr(plan, name) is not None:
            raise ArgumentError(f"horovod makes its ranks and their rendezvous: no {name}")
    if hosts is None and plan.nnodes > 1:
        raise ArgumentError(
            f"nnodes={plan.nnodes}: horovod starts all nodes from one: call it there alone, with "
            'hosts="name:ranks,name:ranks"'
        )
    if hosts is None:
        return {"localhost": plan.nproc_per_node}
    matches = [_HOST.fullmatch(item.strip()) for item in hosts.split(",")] if hosts else [None]
    slots = {match[1]: int(match[2]) for match in matches if match}
    if len(slots) != len(matches):
        raise ArgumentError(
            f'hosts={hosts!r} should be "name:ranks,name:ranks", each name once, 1 rank or more'
        )
    if max(slots.values()) != plan.nproc_per_node:
        raise ArgumentError(
            f"hosts={hosts!r} has up to {max(slots.values())} ranks on a host: pass that as "
            f"nproc_per_node, not {plan.nproc_per_node}"
        )
    if plan.nnodes not in (1, len(slots)):
        raise ArgumentError(f"hosts={hosts!r} has {len(slots)} hosts, but nnodes={plan.nnodes}")
    return slots


def _infos(slots: dict[str, int]) -> list[RankInfo]:
    """Seat the ranks host by host, as horovodrun does."""
    infos: list[RankInfo] = []
    world_size = sum(slots.values())
    for node_rank, count in enumerate(slots.values()):
        for local_rank in range(count):
            place = (len(infos), world_size, local_rank, count, node_rank, len(slots))
            infos.append(RankInfo(*place, source="spawn"))
    return infos


def _resolve(names: list[str]) -> None:
    """Refuse hosts without an address, and names that no name server answers for."""
    unknown: dict[str, object] = dict.fromkeys(names, f"no answer in {_RESOLVE_S:g} s")

    def look_up(name: str) -> None:
        try:
            socket.gethostbyname(name)
        except OSError as error:
            unknown[name] = error
        else:
            del unknown[name]

    lookups = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    for lookup in lookups:
        lookup.start()
    for lookup in lookups:
        lookup.join(_RESOLVE_S)
    if unknown:
        why = "; ".join(f"{name}: {reason}" for name, reason in unknown.items())
        raise LaunchError(f"hosts that don't resolve ({why}): nothing was started; check hosts=")


def _listen(is_local: bool, n_ranks: int, held: ExitStack) -> tuple[socket.socket, str | int]:
    """Open the socket that ranks connect to; gives its path, or its port."""
    if is_local:
        return listen_privately(n_ranks, held)
    listener = held.enter_context(listen("", 0))
    return listener, listener.getsockname()[1]


def _start(
    slots: dict[str, int], link: str, environ: Mapping[str, str], *, is_verbose: bool
) -> subprocess.Popen[bytes]:
    path = search_path()
    hosts = ",".join(f"{name}:{count}" for name, count in slots.items())
    arguments = ["--gloo", "--disable-cache", "-np", str(sum(slots.values())), "-H", hosts]
    arguments += ["--verbose"] if is_verbose else []
    command = [*interpreter(), "-c", boot(path, link)]
    kept = without(os.environ, OF_HOROVOD, OF_MPI, OF_TORCH)  # horovodrun would let them win
    variables = {**environ, **kept}
    variables.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    return subprocess.Popen(
        [sys.executable, "-c", _DRIVER.format(path=path), *arguments, *command],
        env=variables,
        stdin=subprocess.PIPE,  # its end tells horovodrun that this process has ended
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
