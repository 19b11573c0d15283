"""Scripts, and functions of any model, in ranks that mpiexec makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from unisono.launchers.job.store import hold
from unisono.launchers.mpi import functions
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import Outcome, run_launcher
from unisono.topology import PRIVATE_STORE, LaunchPlan, RankInfo


def argv(script: Script, launcher: Sequence[str], version: str) -> list[str]:
    """Write mpiexec's command line."""
    script.refuse("mpi", "mpiexec finds it out", "node_rank")
    script.refuse("mpi", "use launcher 'torchrun'", "max_restarts")
    if not script.hosts and script.nnodes == 1:
        return [*functions.argv(script.plan(), launcher, version), *script.rank_argv()]
    arguments = [*launcher, "-n", str(script.world_size)]
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    if script.hosts:
        hosts = ",".join(f"{name}:{count}" for name, count in script.hosts)
        arguments += ["--host" if is_open_mpi else "-hosts", hosts]
    if is_open_mpi:
        where = ":OVERSUBSCRIBE" if script.hosts else f"ppr:{script.nproc_per_node}:node"
        arguments += ["--map-by", where, "--bind-to", "none"]
    elif not script.hosts:
        arguments += ["-ppn", str(script.nproc_per_node)]
    return [*arguments, *script.rank_argv()]


def command(script: Script) -> list[str]:
    """Write the command line that does the same without unisono's command."""
    arguments = [functions.find_mpiexec()]
    return argv(
        replace(script, token="", is_coloured=False), arguments, functions._version(arguments[0])
    )


def environment(script: Script, environ: Mapping[str, str], is_root: bool) -> dict[str, str]:
    """Write mpiexec's variables, which ranks of this host inherit."""
    return functions.environment(environ, is_root) | script.address()


def run(script: Script) -> Outcome:
    """Run a script in ranks of an MPI job."""
    # On one host a store listens on the loopback for ranks that meet by torch's variables.
    program = functions.find_mpiexec()
    arguments = argv(script, [program], functions._version(program))
    variables = environment(script, os.environ, is_root=os.geteuid() == 0)
    if script.hosts or script.nnodes > 1 or script.master_port is not None:
        return run_launcher(script, arguments, variables)
    with ExitStack() as held:
        plan = hold(script.plan(), held)
        variables |= {
            "MASTER_ADDR": str(plan.master_addr),
            "MASTER_PORT": str(plan.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            PRIVATE_STORE: str(plan.private_store),
        }
        return run_launcher(script, arguments, variables)


@dataclass(frozen=True, slots=True)
class _InStore:
    """An entry whose ranks meet at the store of the process that launched them."""

    entry: Callable[[RankInfo], Any]
    plan: LaunchPlan
    environ: Mapping[str, str]

    def __call__(self, info: RankInfo) -> Any:
        for name, value in self.environ.items():
            os.environ.setdefault(name, value)
        os.environ[PRIVATE_STORE] = str(self.plan.private_store)
        where = self.plan.info(info.local_rank or 0)
        return self.entry(replace(where, source=info.source))


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run `entry` in the ranks of an MPI job on this host, whatever model it uses."""
    # Arguments and errors are those of `functions.launch`, which starts the ranks; besides,
    # they meet at a store of this process, as models need it that aren't MPI's.
    with ExitStack() as held:
        hosted = hold(replace(plan, master_addr=None, master_port=None, node_rank=0), held)
        return functions.launch(_InStore(entry, hosted, environ or {}), plan, timeout_s=timeout_s)
