"""Open MPI's mpirun, and what is built on it.

OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE are documented at
docs.open-mpi.org/en/main/tuning-apps/environment-var.html. OMPI_COMM_WORLD_NODE_RANK is not read:
it is the rank of the process on its node over all jobs, not the rank of the node, which no
variable says. PMIX_NAMESPACE (PMIx standard, ``pmix.nspace``) is the id of the job: a number from
Open MPI 4, ``prterun-HOST-PID@1`` from Open MPI 5; OMPI_MCA_ess_base_jobid is the same number
before PMIx.

The address of a job of several nodes can't be had from its variables (the URIs among them lead to
mpirun, which need not be where rank 0 is): set MASTER_ADDR, as in ``mpirun -x MASTER_ADDR``.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.environments._mpi import Names, read_mpi
from unisono.topology import RankInfo

__all__ = ("EXAMPLES", "NAME", "detect")

NAME = "openmpi"
EXAMPLES = (
    {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "1550319617",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    },
)
_NAMES = Names(
    marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank=("OMPI_COMM_WORLD_RANK",),
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_REMEDY = "start the program with Open MPI's mpirun, or unset the OMPI_COMM_WORLD variables"


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read Open MPI's variables.

    Local. Where MASTER_ADDR and MASTER_PORT aren't set and all processes are on one node, the
    address is 127.0.0.1 and the port is derived from the id of the job, new for each mpirun.
    LSF's jsrun sets these variables too; they are left to `lsf`, which says more.

    Args:
        env: the variables.

    Returns:
        The facts; None if mpirun's variables are not there, or are jsrun's.

    Raises:
        EnvironmentDetectionError: the variables are partial, malformed or contradict each other.
    """
    if env.get("JSM_NAMESPACE_RANK"):
        return None
    return read_mpi(env, NAME, _NAMES, _REMEDY)
