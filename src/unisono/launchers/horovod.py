"""Ranks that horovodrun makes with its gloo controller, on this host or over ssh.

Horovodrun is a process of its own: it replaces signal handlers, prints, and leaves servers behind.
Functions and results don't travel through Horovod's store, which takes pickles from anybody on the
network: ranks connect to this process, as those of other launchers do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import ArgumentError, LaunchError
from unisono.launchers.job.job import Job
from unisono.launchers.job.tail import Tail, show_error
from unisono.launchers.job.wrapper import boot
from unisono.launchers.script.remote_workers import (
    ConnectedRank,
    LauncherSpec,
    RemoteWorkers,
    run_function,
)
from unisono.launchers.script.script import Script
from unisono.launchers.variables import OF_HOROVOD, OF_MPI, OF_TORCH, without
from unisono.topology import LaunchPlan, RankInfo

_HOST = re.compile(r"([\w.-]+):([1-9][0-9]*)")
# Horovodrun's own address, which it made sure that every host can reach.
_HOST_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_NAMES = tuple(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_RESOLVE_S = 5.0
_FROM_RANK = re.compile(rb"\[\d+\]<(stdout|stderr)>:")
_LINE = re.compile(rb"(?<=[\r\n])")
_SHELL_SAYS = frozenset({"Terminated", "Killed", "Aborted"})


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
    is_local = set(slots) <= {"localhost", "127.0.0.1"}
    spec = LauncherSpec(
        "horovodrun",
        sum(slots.values()),
        host="" if is_local else _HOST_VARIABLE,
        names=_NAMES,
        stop_limit_s=stop_limit_s,
        end_signal=signal.SIGKILL,  # its helpers end the ranks then
    )
    prepare = partial(_prepare, slots, bool(verbose))
    nodes = [node for node, count in enumerate(slots.values()) for _ in range(count)]
    ranks = partial(_Ranks, nodes, bool(verbose))
    return run_function(entry, Script.of(plan), spec, prepare, environ or {}, ranks)


class _Ranks(RemoteWorkers):
    """Ranks of one horovodrun, which marks their lines."""

    stdout = subprocess.PIPE
    drain_s = 15.0  # horovodrun's helpers give ranks 5 s to end, twice

    def __init__(self, nodes: Sequence[int], is_verbose: bool, *args: Any) -> None:
        super().__init__(*args)
        self._nodes = nodes
        self._is_verbose, self._is_ending = is_verbose, False
        self._notes: deque[str] = deque(maxlen=40)

    def listen_to(self, process: subprocess.Popen[bytes]) -> list[Tail]:
        """Print what ranks print without horovodrun's marks, and keep what horovodrun says."""
        return [Tail(pipe, self._taker()) for pipe in (process.stdout, process.stderr)]

    def last_lines(self) -> str:
        """Return what horovodrun said."""
        for tail in self.tails:
            tail.has_ended(1.0)
        return "\n".join(self._notes)

    def seat(self, job: Job[Any], arrival: ConnectedRank) -> None:
        """Add a rank to the workers, with its node, which horovodrun doesn't pass on."""
        assert isinstance(arrival.who, RankInfo)
        node, nnodes = self._nodes[arrival.who.rank], self._nodes[-1] + 1
        super().seat(job, replace(arrival, who=replace(arrival.who, node_rank=node, nnodes=nnodes)))

    def doubt(self, rank: int) -> int:
        """Doubt that a rank aborted by itself."""
        # Horovod aborts a process whose peer is lost while it has groups.
        status = next(worker.wait_status for worker in self.workers if worker.rank == rank)
        return int(status is None or os.waitstatus_to_exitcode(status) == -signal.SIGABRT)

    def end(self, job: Job[Any]) -> None:
        """End all ranks and horovodrun, within seconds."""
        self._is_ending = True  # of which the ranks' shells tell
        super().end(job)

    def _taker(self) -> Callable[[bytes], None]:
        """Make what takes the pieces of one stream, the last of them empty."""
        rest = b""

        def take(data: bytes) -> None:
            nonlocal rest
            *lines, rest = _LINE.split(rest + data) if data else (rest, b"")
            for line in filter(None, lines):
                self._sort(line)

        return take

    def _sort(self, line: bytes) -> None:
        match = _FROM_RANK.match(line)
        if match is None:
            self._notes.append(line.decode(errors="replace").rstrip())
            if self._is_verbose:
                show_error(line)
            return
        text = line[match.end() :].decode(errors="replace")
        if self._is_ending and text.rstrip() in _SHELL_SAYS:
            return
        stream: Any = sys.stderr if match[1] == b"stderr" else sys.stdout
        with contextlib.suppress(Exception):  # it may be closed, or a user's own
            stream.write(text)
            stream.flush()


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


def _prepare(
    slots: Mapping[str, int], is_verbose: bool, script: Script, _: ExitStack
) -> tuple[list[str], dict[str, str]]:
    hosts = ",".join(f"{name}:{count}" for name, count in slots.items())
    driver = boot("from horovod.runner.launch import run_commandline; run_commandline()")
    arguments = [*driver, "--gloo", "--disable-cache"]
    arguments += ["-np", str(sum(slots.values())), "-H", hosts, *(["--verbose"] * is_verbose)]
    variables = without(os.environ, OF_HOROVOD, OF_MPI, OF_TORCH)  # horovodrun lets them win
    variables.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    return [*arguments, *script.rank_argv()], variables
