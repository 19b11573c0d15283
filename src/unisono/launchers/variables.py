"""Environment variables of ranks: their identity, and leftovers of an enclosing job."""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono.topology import PREFIXED, PRIVATE_STORE, RankInfo

# Variables that an enclosing job has set for its own ranks, by library. Each of torchrun's options
# that isn't given is read from a PET_ variable, so those of the enclosing job must go, too.
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
# These would place a new step's tasks like the enclosing one's; the allocation's variables stay.
OF_SLURM_STEP = re.compile(
    r"SLURM_(STEP|PROCID|LOCALID|NODEID|TASK_PID|DISTRIBUTION|LAUNCH_|SRUN_|GTIDS|UMASK)"
)
# The variable with the address to which ranks of a function connect; each rank removes it first.
LINK = "UNISONO_LINK"


def without(environ: Mapping[str, str], *families: re.Pattern[str]) -> dict[str, str]:
    """Copy variables, except those of a job that this process may belong to."""
    # Ranks of a new job would take them for their own.
    return {
        name: value
        for name, value in environ.items()
        if not any(family.match(name) for family in families)
    }


def run_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy the variables of `unisono run`, for ranks that don't inherit this process's."""
    return {name: environ[name] for name in ("UNISONO_BACKEND", "UNISONO_TRACE") if name in environ}


def rank_variables(info: RankInfo) -> dict[str, str]:
    """Return torch's variables for one rank."""
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
    """Return the number of threads as a variable, if the rank shares its host with others."""
    is_alone = info.local_world_size in (None, 1)
    return {} if is_alone else {"OMP_NUM_THREADS": str(info.core_share())}


def node_variables(info: RankInfo) -> dict[str, str]:
    """Return a node's variables, named as torch's agent names them."""
    return texts({"GROUP_RANK": info.node_rank, "GROUP_WORLD_SIZE": info.nnodes})


def texts(facts: Mapping[str, object]) -> dict[str, str]:
    """Return facts as variables, without those that are None."""
    return {name: str(value) for name, value in facts.items() if value is not None}
