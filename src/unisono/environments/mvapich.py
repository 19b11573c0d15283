"""MVAPICH2's mpirun_rsh and its Hydra.

MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE are what ``mpispawn`` sets for each process
(``src/pm/mpirun/mpispawn.c`` of MVAPICH2); the MVAPICH2 User Guide tells users to read them.
MVAPICH 3 and later is started by MPICH's Hydra and found by `mpich`.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.environments._mpi import Names, read_mpi
from unisono.topology import RankInfo

__all__ = ("EXAMPLES", "NAME", "detect")

NAME = "mvapich"
EXAMPLES = (
    {
        "MV2_COMM_WORLD_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "c01",
        "MASTER_PORT": "29511",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
    },
)
_NAMES = Names(
    marks=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    rank=("MV2_COMM_WORLD_RANK",),
    world_size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
)
_REMEDY = "start the program with MVAPICH2's mpirun_rsh, or unset the MV2_COMM_WORLD variables"


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read MVAPICH2's variables.

    Local. None of them is an id of the job, so address and port are what MASTER_ADDR and
    MASTER_PORT say, as in ``mpirun_rsh -np 4 MASTER_ADDR=host MASTER_PORT=port ./program``.

    Args:
        env: the variables.

    Returns:
        The facts; None if MVAPICH2's variables are not there.

    Raises:
        EnvironmentDetectionError: the variables are partial, malformed or contradict each other.
    """
    return read_mpi(env, NAME, _NAMES, _REMEDY)
