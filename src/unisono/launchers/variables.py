"""Environment variables of ranks: their identity, and leftovers of an enclosing job."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono.topology import PREFIXED, PRIVATE_STORE, RankInfo

# What a job around this process has set for its own ranks, by the library that sets it. PET_ is for
# torchrun, each of whose options has a variable: one that isn't given would be taken from there.
OF_TORCH = re.compile(
    r"((LOCAL_|GROUP_|NODE_)?RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    rf"|{PRIVATE_STORE}|{PREFIXED})$|TORCHELASTIC_|ROLE_|PET_"
)
OF_MPI = re.compile(
    r"OMPI_(?!MCA_|ALLOW_)|OMPI_MCA_(ess|orte|pmix|orted)(_|$)|PMIX?_|PMI2_|PRTE_(?!MCA_|ALLOW_)"
    r"|HYDI_|MPI_LOCAL"
)
OF_HOROVOD = re.compile(r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME)$")
OF_XLA = re.compile(r"(TORCHELASTIC_RUN_ID|PJRT_LOCAL_PROCESS_(RANK|COUNT))$")
# They would place the tasks of another step; those of the allocation are kept.
OF_SLURM_STEP = re.compile(
    r"SLURM_(STEP|PROCID|LOCALID|NODEID|TASK_PID|DISTRIBUTION|LAUNCH_|SRUN_|GTIDS|UMASK)"
)
# The address for ranks of a function; removed in the rank before the function runs.
LINK = "UNISONO_LINK"


def without(environ: Mapping[str, str], *families: re.Pattern[str]) -> dict[str, str]:
    """Copy variables without those of a job that this process may itself belong to."""
    # Ranks of a new job would take them for their own.
    return {
        name: value
        for name, value in environ.items()
        if not any(family.match(name) for family in families)
    }


def run_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy what `unisono run` has set, for ranks that don't inherit this process's variables."""
    return {name: environ[name] for name in ("UNISONO_BACKEND", "UNISONO_TRACE") if name in environ}


def rank_variables(info: RankInfo) -> dict[str, str]:
    """Write torch's variables for one rank."""
    return texts(
        {
            "RANK": info.rank,
            "WORLD_SIZE": info.world_size,
            "LOCAL_RANK": info.local_rank,
            "LOCAL_WORLD_SIZE": info.local_world_size,
            "MASTER_ADDR": info.master_addr,
            "MASTER_PORT": info.master_port,
        }
    )


def share_of_cores(info: RankInfo) -> dict[str, str]:
    """Write the number of threads of a rank that shares its host with others."""
    is_alone = info.local_world_size in (None, 1)
    return {} if is_alone else {"OMP_NUM_THREADS": str(info.core_share())}


def node_variables(info: RankInfo) -> dict[str, str]:
    """Write the names that torch's agent gives to a rank's node."""
    return texts({"GROUP_RANK": info.node_rank, "GROUP_WORLD_SIZE": info.nnodes})


def texts(facts: Mapping[str, object]) -> dict[str, str]:
    """Write variables without those that are None."""
    return {name: str(value) for name, value in facts.items() if value is not None}
