"""Cray's ALPS: aprun on XE, XK and XC systems; Cray EX is `pals` or `slurm`.

ALPS_APP_PE is the rank and ALPS_APP_ID the id of the application: ``aprun(1)``, and the aprun of
PALS, which lists them as the older names of PALS_RANKID and PALS_APID (APRUN_ENV_ALIAS). aprun says
neither the number of processes nor anything about the node: PMI_SIZE or WORLD_SIZE has to be given
by hand (``aprun -n 8 -e PMI_SIZE=8 ...``); PMI_LOCAL_RANK and PMI_LOCAL_SIZE, HPE's names for the
facts of the node, count where a wrapper exports them.
"""

from __future__ import annotations

from collections.abc import Mapping

from unisono.environments._mpi import Names, read_mpi
from unisono.topology import RankInfo

__all__ = ("EXAMPLES", "NAME", "detect")

NAME = "cray"
EXAMPLES = (
    {
        "ALPS_APP_PE": "3",
        "PMI_SIZE": "8",
        "ALPS_APP_ID": "5494721",
    },
)
_NAMES = Names(
    marks=("ALPS_APP_PE",),
    rank=("ALPS_APP_PE",),
    world_size=("PMI_SIZE", "WORLD_SIZE"),
    local_rank=("PMI_LOCAL_RANK",),
    local_world_size=("PMI_LOCAL_SIZE",),
    job=("ALPS_APP_ID",),
)
_REMEDY = (
    "give the number of processes by hand, as in aprun -n 8 -e PMI_SIZE=8, or unset the ALPS_ "
    "variables"
)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read ALPS's variables.

    Local. Where MASTER_ADDR and MASTER_PORT aren't set and all processes are known to be on one
    node, the address is 127.0.0.1 and the port is derived from ALPS_APP_ID. PALS's aprun sets
    these variables too; they are left to `pals`.

    Args:
        env: the variables.

    Returns:
        The facts; None if ALPS's variables are not there, or are PALS's.

    Raises:
        EnvironmentDetectionError: the variables are partial, malformed or contradict each other.
    """
    if env.get("PALS_RANKID"):
        return None
    return read_mpi(env, NAME, _NAMES, _REMEDY)
