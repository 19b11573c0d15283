"""Ranks that horovodrun starts with its gloo controller, on this host or over ssh.

horovodrun runs in a process of its own, because it replaces signal handlers, prints, and leaves
servers behind. Functions and results aren't sent through Horovod's store, which accepts pickles
from anyone on the network: as under other launchers, ranks connect to this process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from unisono.arguments import ranks_by_host
from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import ArgumentError
from unisono.launchers.job.job import Job
from unisono.launchers.job.output import show
from unisono.launchers.job.wrapper import boot
from unisono.launchers.script.remote_workers import LauncherSpec, RemoteWorkers, run_function
from unisono.launchers.script.script import Script
from unisono.launchers.variables import OF_HOROVOD, OF_MPI, OF_TORCH, without
from unisono.topology import LaunchPlan, RankInfo

# The variable with horovodrun's address; it has checked that every host can reach it.
_HOST_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_NAMES = tuple(f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
_SHELL_MESSAGES = (b"Terminated", b"Killed", b"Aborted")
_FROM_RANK = re.compile(rb"\[\d+\]<(stdout|stderr)>:")


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    join: bool = True,
    hosts: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Run `entry` in ranks of a Horovod job."""
    if use_gloo is False:
        raise ArgumentError(
            "use_gloo=False: unisono starts Horovod ranks only over gloo; for MPI, start "
            "them with mpirun"
        )
    slots = _slots(plan, hosts)
    is_local = set(slots) <= {"localhost", "127.0.0.1"}
    spec = LauncherSpec(
        "horovodrun",
        sum(slots.values()),
        host="" if is_local else _HOST_VARIABLE,
        names=_NAMES,
        stop_limit_s=stop_limit_s,
        end_signal=signal.SIGKILL,  # horovodrun's helper processes then end the ranks
    )
    prepare = partial(_prepare, slots, bool(verbose))
    nodes = [node for node, count in enumerate(slots.values()) for _ in range(count)]
    ranks = partial(_HorovodWorkers, nodes, bool(verbose))
    return run_function(entry, Script.of(plan), spec, prepare, environ or {}, ranks, join=join)


class _HorovodWorkers(RemoteWorkers):
    """Ranks of one horovodrun, which prefixes each line of their output."""

    stdout = subprocess.PIPE
    drain_s = 15.0  # horovodrun's helper processes wait twice 5 s for ranks to end

    def __init__(self, nodes: Sequence[int], is_verbose: bool, *args: Any) -> None:
        super().__init__(*args)
        self._nodes, self._is_verbose, self._is_ending = nodes, is_verbose, False

    def print(self, target: int, line: bytes) -> None:
        """Print a rank's line without its prefix; print horovodrun's own lines only if verbose."""
        prefix = _FROM_RANK.match(line)
        # The shells that run the ranks print these messages when the ranks are killed.
        text = line if prefix is None else line[prefix.end() :]
        if prefix is not None and self._is_ending and text.rstrip() in _SHELL_MESSAGES:
            return
        if prefix is not None:
            show(2 if prefix[1] == b"stderr" else 1, text)
        elif self._is_verbose:
            super().print(2, line)
        else:
            self.last.append(line.decode(errors="replace").rstrip())

    def end(self, job: Job[Any]) -> None:
        self._is_ending = True
        super().end(job)

    def with_node(self, who: RankInfo) -> RankInfo:
        return replace(who, node_rank=self._nodes[who.rank], nnodes=self._nodes[-1] + 1)

    def cause_order(self, rank: int) -> int:
        """Return 1 if a rank may have been aborted because of a peer."""
        # With groups, Horovod aborts a process when it loses a peer.
        status = next(worker.wait_status for worker in self.workers if worker.rank == rank)
        return int(status is None or os.waitstatus_to_exitcode(status) == -signal.SIGABRT)


def _slots(plan: LaunchPlan, hosts: str | None) -> dict[str, int]:
    """Return the number of ranks by host; raise if `hosts` contradicts the plan."""
    for name in ("init_method", "start_method"):
        if getattr(plan, name) is not None:
            raise ArgumentError(
                f"horovod creates its ranks and their rendezvous itself, so it takes no {name}"
            )
    if hosts is None and plan.nnodes > 1:
        raise ArgumentError(
            f"nnodes={plan.nnodes}: horovod starts the ranks of all nodes from one node: call "
            'it on that node only, with hosts="name:ranks,name:ranks"'
        )
    if hosts is None:
        return {"localhost": plan.nproc_per_node}
    slots = ranks_by_host("hosts", hosts)
    if max(slots.values()) != plan.nproc_per_node:
        raise ArgumentError(
            f"hosts={hosts!r} has up to {max(slots.values())} ranks on a host: pass "
            f"nproc_per_node={max(slots.values())}, not {plan.nproc_per_node}"
        )
    if plan.nnodes not in (1, len(slots)):  # 1 is the default, which `hosts` overrides
        raise ArgumentError(f"hosts={hosts!r} has {len(slots)} hosts, but nnodes={plan.nnodes}")
    return slots


def _prepare(
    slots: Mapping[str, int], is_verbose: bool, script: Script, _: ExitStack
) -> tuple[list[str], dict[str, str]]:
    """Return horovodrun's command line and variables."""
    hosts = ",".join(f"{name}:{count}" for name, count in slots.items())
    driver = boot("from horovod.runner.launch import run_commandline; run_commandline()")
    # Without --disable-cache, horovodrun checks hosts once an hour, though they may have changed.
    arguments = [*driver, "--gloo", "--disable-cache"]
    arguments += ["-np", str(sum(slots.values())), "-H", hosts, *(["--verbose"] * is_verbose)]
    variables = without(os.environ, OF_HOROVOD, OF_MPI, OF_TORCH)  # which override its options
    # Without it, no group could be created later.
    variables.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    return [*arguments, *script.rank_argv()], variables
