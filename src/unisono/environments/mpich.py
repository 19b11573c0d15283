"""MPICH's Hydra, Intel MPI, and other launchers that speak PMI.

PMI_RANK and PMI_SIZE are documented in Microsoft's "Environment Variables for the mpiexec Command"
and (the first) in MPICH's "PMI-2 Wire Protocol". MPI_LOCALRANKID and MPI_LOCALNRANKS have no page
of their own: hydra_pmi_proxy of MPICH and of Intel MPI sets them, as recorded from MPICH 5.0 and
Intel MPI 2021. HPE's PMI says PMI_LOCAL_RANK and PMI_LOCAL_SIZE instead (``pals.h``).
I_MPI_HYDRA_UUID, new for each mpiexec of Intel's, is the id of the job; MPICH has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.environments._mpi import Names, read_mpi
from unisono.topology import RankInfo

__all__ = ("EXAMPLES", "NAME", "detect")

NAME = "mpich"
EXAMPLES = (
    {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": "1",
    },
)
_NAMES = Names(
    marks=("PMI_RANK", "PMI_SIZE"),
    rank=("PMI_RANK",),
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job=("I_MPI_HYDRA_UUID",),
)
_REMEDY = "start the program with mpiexec of MPICH or Intel MPI, or unset the PMI_ variables"
_OWNERS = ("MV2_COMM_WORLD_RANK", "PALS_RANKID", "ALPS_APP_PE")


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of PMI.

    Local. Where MASTER_ADDR and MASTER_PORT aren't set there is an address only for Intel MPI on
    one node: 127.0.0.1 and a port derived from I_MPI_HYDRA_UUID. MPICH has no id of the job to
    derive one from: set both, as in ``mpiexec -genv MASTER_ADDR host -genv MASTER_PORT port``.
    MVAPICH, PALS and ALPS set some of these variables too; they are left to their own modules.

    Args:
        env: the variables.

    Returns:
        The facts; None if PMI's variables are not there, or belong to another launcher.

    Raises:
        EnvironmentDetectionError: the variables are partial, malformed or contradict each other.
    """
    if any(map(env.get, _OWNERS)):
        return None
    return read_mpi(env, NAME, _NAMES, _REMEDY)
