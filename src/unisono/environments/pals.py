"""PALS, the launcher of HPE Cray EX systems: mpiexec and aprun under PBS.

PALS_RANKID, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE, PALS_NODEID, PALS_APID and the PMI_ variables are
named in HPE's header ``pals.h`` and in its ``mpiexec(1)``. There is no PALS variable for the number
of processes: with ``--pmi=cray`` PMI_SIZE says it, with ``--pmi=pmix`` nothing does (it is in the
binary file that PALS_APINFO names, which is not read here). Where it is missing, PALS_SIZE,
PMI_SIZE or WORLD_SIZE may be given by hand: ``mpiexec -n 8 --env PMI_SIZE=8 ...``.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.environments._mpi import Names, read_mpi
from unisono.topology import RankInfo

__all__ = ("EXAMPLES", "NAME", "detect")

NAME = "pals"
EXAMPLES = (
    {
        "PALS_RANKID": "3",
        "PMI_SIZE": "4",
        "PALS_LOCAL_SIZE": "4",
        "PALS_APID": "7d5a1e52-0a34-4f8e-8d5d-0f9c3f6c2b77",
        "PALS_LOCAL_RANKID": "3",
        "PALS_NODEID": "0",
    },
)
_NAMES = Names(
    marks=("PALS_RANKID",),
    rank=("PALS_RANKID",),
    world_size=("PALS_SIZE", "PMI_SIZE", "WORLD_SIZE"),
    local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    node_rank=("PALS_NODEID",),
    job=("PALS_APID",),
)
_REMEDY = (
    "start the program with PALS's mpiexec --pmi=cray, or give the number of processes by hand as "
    "in mpiexec --env PMI_SIZE=8, or unset the PALS_ variables"
)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read PALS's variables.

    Local. Where MASTER_ADDR and MASTER_PORT aren't set and all processes are on one node, the
    address is 127.0.0.1 and the port is derived from PALS_APID, new for each mpiexec; on
    several nodes the hosts are in a file (PBS_NODEFILE) and MASTER_ADDR has to be set. Slurm's
    ``srun --mpi=cray_shasta`` sets some of these variables too; they are left to `slurm`.

    Args:
        env: the variables.

    Returns:
        The facts; None if PALS's variables are not there, or are Slurm's.

    Raises:
        EnvironmentDetectionError: the variables are partial, malformed or contradict each other.
    """
    if env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID"):
        return None
    return read_mpi(env, NAME, _NAMES, _REMEDY)
