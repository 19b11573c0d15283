"""LSF's jsrun (the Job Step Manager of IBM's clusters).

JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE are what jsrun sets in each task (Lightning
documents them under ``LSFEnvironment``); LSB_JOBID and LSB_MCPU_HOSTS are documented in IBM
Spectrum LSF's "Environment variables set for job execution". LSB_DJOB_RANKFILE is not read: it is
the name of a file with the hosts that LSB_MCPU_HOSTS lists. mpirun within an LSF job is found by
the module of that MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono.environments._mpi import Names, read_mpi
from unisono.topology import RankInfo

__all__ = ("EXAMPLES", "NAME", "detect")

NAME = "lsf"
EXAMPLES = (
    {
        "LSB_MCPU_HOSTS": "batch2 1 c01n03 42 c01n04 42",
        "JSM_NAMESPACE_RANK": "6",
        "JSM_NAMESPACE_SIZE": "12",
        "JSM_NAMESPACE_LOCAL_SIZE": "6",
        "LSB_JOBID": "1201234",
        "PMIX_NAMESPACE": "3",
        "JSM_NAMESPACE_LOCAL_RANK": "0",
    },
)
_NAMES = Names(
    marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    rank=("JSM_NAMESPACE_RANK",),
    world_size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    job=("LSB_JOBID",),
    step=("PMIX_NAMESPACE",),
)
_REMEDY = "start the program with jsrun, or unset the JSM_NAMESPACE variables"
# LSB_MCPU_HOSTS is "host slots host slots ...", such as "batch2 1 c01n03 42 c01n04 42"
_PAIR = r"[A-Za-z0-9._-]{1,255}) +[0-9]{1,9}"
_HOSTS = re.compile(rf" *(?P<first>{_PAIR}(?: +(?P<second>{_PAIR}(?= |$)| *$)")


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read jsrun's variables.

    Local. Where MASTER_ADDR isn't set, the address is 127.0.0.1 if all tasks are on one node, and
    else the first compute host of LSB_MCPU_HOSTS, where jsrun begins to place tasks (the host
    before it is the one that jsrun itself runs on). Of several jsrun at a time in one job each
    needs a MASTER_ADDR of its own. The port is derived from LSB_JOBID and the number of the step.

    Args:
        env: the variables.

    Returns:
        The facts; None if jsrun's variables are not there.

    Raises:
        EnvironmentDetectionError: the variables are partial, malformed or contradict each other.
    """
    return read_mpi(env, NAME, _NAMES, _REMEDY, first_host=_first_compute_host(env))


def _first_compute_host(env: Mapping[str, str]) -> str | None:
    match = _HOSTS.match(env.get("LSB_MCPU_HOSTS", ""))
    return None if match is None else match["second"] or match["first"]
