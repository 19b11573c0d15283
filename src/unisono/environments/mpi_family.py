"""The launchers of MPI: one row each, for they say the same by other names.

What a row's variables are, where they are documented, and what they can't tell stands above it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unisono.environments.reader import Reader, UncheckedInfo, make_info, port_of
from unisono.topology import RankInfo


@dataclass(frozen=True, slots=True)
class MpiEnvironment:
    """One launcher of MPI and its variables; the first that is set counts for a fact."""

    NAME: str
    marks: tuple[str, ...]
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    remedy: str
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    nnodes: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    step: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    first_host: Callable[[Mapping[str, str]], str | None] = lambda env: None
    EXAMPLES: tuple[Mapping[str, str], ...] = ()

    def detect(self, env: Mapping[str, str]) -> RankInfo | None:
        """Read the variables of this launcher."""
        # MASTER_ADDR and MASTER_PORT count where they are set. Else the address is 127.0.0.1
        # where all processes are on this node, what `first_host` reads elsewhere, and the port is
        # derived from the id of the job. Without such an id there is neither: two jobs on one host
        # would meet.
        if any(map(env.get, self.owners)):
            return None
        first_host = self.first_host(env)
        reader = Reader(env, self.NAME, self.remedy)
        if not reader.has(*self.marks):
            return None
        return make_info(reader, self._unchecked(reader, first_host))

    def _unchecked(self, reader: Reader, first_host: str | None) -> UncheckedInfo:
        rank = reader.needed(*self.rank)
        world_size = reader.needed(*self.world_size, least=1)
        local_world_size = reader.number(*self.local_world_size, least=1)
        nnodes = reader.number(*self.nnodes, least=1)
        is_one_node = local_world_size is not None and local_world_size.value == world_size.value
        is_one_node = is_one_node or (nnodes is not None and nnodes.value == 1)
        address, port = self._rendezvous(reader, "127.0.0.1" if is_one_node else first_host)
        return UncheckedInfo(
            rank,
            world_size,
            local_rank=reader.number(*self.local_rank),
            local_world_size=local_world_size,
            node_rank=reader.number(*self.node_rank),
            nnodes=nnodes,
            master_addr=address,
            master_port=port,
            job_id=self._job_id(reader),
        )

    def _job_id(self, reader: Reader) -> str | None:
        ids = [reader.text(*self.job), reader.text(*self.step)]
        return ".".join(each[1] for each in ids if each is not None) or None

    def _rendezvous(self, reader: Reader, host: str | None) -> tuple[str | None, int | None]:
        address, port, job = reader.address(), reader.port(), reader.text(*self.job)
        if port is None and job is not None and (address or host):
            step = reader.text(*self.step)
            port = port_of(job[1], "0" if step is None else step[1])
        return address or (host if port is not None else None), port


# Open MPI's mpirun, and what is built on it.
#
# OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE are documented at
# docs.open-mpi.org/en/main/tuning-apps/environment-var.html. OMPI_COMM_WORLD_NODE_RANK is not read:
# it is the rank of the process on its node over all jobs, not the rank of the node, which no
# variable says. PMIX_NAMESPACE (PMIx standard, `pmix.nspace`) is the id of the job, a new one for
# each mpirun: a number from Open MPI 4, `prterun-HOST-PID@1` from Open MPI 5;
# OMPI_MCA_ess_base_jobid is the same number before PMIx.
# The address of a job of several nodes isn't in its variables (the URIs among them lead to mpirun,
# which may be on another host than rank 0): set MASTER_ADDR, as in `mpirun -x MASTER_ADDR`.
# LSF's jsrun sets these variables too; they are left to LSF, which says more.
OPENMPI = MpiEnvironment(
    "openmpi",
    marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    rank=("OMPI_COMM_WORLD_RANK",),
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    owners=("JSM_NAMESPACE_RANK",),
    remedy="start the program with Open MPI's mpirun, or unset the OMPI_COMM_WORLD variables",
    EXAMPLES=(
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "1550319617",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
    ),
)

# MPICH's Hydra, Intel MPI, and other launchers that speak PMI.
#
# PMI_RANK and PMI_SIZE are documented in Microsoft's "Environment Variables for the mpiexec
# Command" and (the first) in MPICH's "PMI-2 Wire Protocol". MPI_LOCALRANKID and MPI_LOCALNRANKS
# have no page of their own: hydra_pmi_proxy of MPICH and of Intel MPI sets them, as recorded from
# MPICH 5.0 and Intel MPI 2021. HPE's PMI says PMI_LOCAL_RANK and PMI_LOCAL_SIZE instead (`pals.h`).
# I_MPI_HYDRA_UUID, a new one for each mpiexec of Intel's, is the id of the job. MPICH has none, so
# there address and port have to be set: `mpiexec -genv MASTER_ADDR host -genv MASTER_PORT port`.
# MVAPICH, PALS and ALPS set some of these variables too; they are left to their own rows.
MPICH = MpiEnvironment(
    "mpich",
    marks=("PMI_RANK", "PMI_SIZE"),
    rank=("PMI_RANK",),
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    job=("I_MPI_HYDRA_UUID",),
    owners=("MV2_COMM_WORLD_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK"),
    remedy="start the program with mpiexec of MPICH or Intel MPI, or unset the PMI_ variables",
    EXAMPLES=(
        {
            "PMI_RANK": "1",
            "PMI_SIZE": "2",
            "MPI_LOCALNRANKS": "2",
            "MPI_LOCALRANKID": "1",
        },
    ),
)

# MVAPICH2's mpirun_rsh and its Hydra.
#
# MV2_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE are what `mpispawn` sets for each process
# (`src/pm/mpirun/mpispawn.c` of MVAPICH2); the MVAPICH2 User Guide tells users to read them.
# MVAPICH 3 and later is started by MPICH's Hydra and found by MPICH's row. No variable is an id of
# the job, so address and port have to be set:
# `mpirun_rsh -np 4 MASTER_ADDR=host MASTER_PORT=port ./program`.
MVAPICH = MpiEnvironment(
    "mvapich",
    marks=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    rank=("MV2_COMM_WORLD_RANK",),
    world_size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    remedy="start the program with MVAPICH2's mpirun_rsh, or unset the MV2_COMM_WORLD variables",
    EXAMPLES=(
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "4",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_ADDR": "c01",
            "MASTER_PORT": "29511",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
        },
    ),
)

# PALS, the launcher of HPE Cray EX systems: mpiexec and aprun under PBS.
#
# PALS_RANKID, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE, PALS_NODEID, PALS_APID (a new one for each
# mpiexec) and the PMI_ variables are named in HPE's header `pals.h` and in its `mpiexec(1)`. There
# is no PALS variable for the number of processes: with `--pmi=cray` PMI_SIZE says it, with
# `--pmi=pmix` nothing does (it is in the binary file that PALS_APINFO names, which is not read
# here). Where it is missing, PALS_SIZE, PMI_SIZE or WORLD_SIZE may be given by hand:
# `mpiexec -n 8 --env PMI_SIZE=8 ...`. The hosts of a job of several nodes are in a file
# (PBS_NODEFILE): MASTER_ADDR has to be set.
# Slurm's `srun --mpi=cray_shasta` sets some of these variables too; they are left to Slurm.
PALS = MpiEnvironment(
    "pals",
    marks=("PALS_RANKID",),
    rank=("PALS_RANKID",),
    world_size=("PALS_SIZE", "PMI_SIZE", "WORLD_SIZE"),
    local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
    local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    node_rank=("PALS_NODEID",),
    job=("PALS_APID",),
    owners=("SLURM_STEP_ID", "SLURM_STEPID"),
    remedy=(
        "start the program with PALS's mpiexec --pmi=cray, or give the number of processes by hand "
        "as in mpiexec --env PMI_SIZE=8, or unset the PALS_ variables"
    ),
    EXAMPLES=(
        {
            "PALS_RANKID": "3",
            "PMI_SIZE": "4",
            "PALS_LOCAL_SIZE": "4",
            "PALS_APID": "7d5a1e52-0a34-4f8e-8d5d-0f9c3f6c2b77",
            "PALS_LOCAL_RANKID": "3",
            "PALS_NODEID": "0",
        },
    ),
)

# Flux: the tasks of `flux run` and `flux submit`.
#
# FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID, FLUX_JOB_NNODES and FLUX_JOB_ID are what the
# job shell sets in each task: `flux-environment(7)`. The number of tasks on a node isn't among
# them, and neither are the hosts: in a job, `flux run --env=MASTER_ADDR=$(flux hostlist --nth=0)`
# names the first. Flux's own PMI sets PMI_RANK and PMI_SIZE beside them.
FLUX = MpiEnvironment(
    "flux",
    marks=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    rank=("FLUX_TASK_RANK",),
    world_size=("FLUX_JOB_SIZE",),
    local_rank=("FLUX_TASK_LOCAL_ID",),
    nnodes=("FLUX_JOB_NNODES",),
    job=("FLUX_JOB_ID",),
    owners=("OMPI_COMM_WORLD_RANK",),
    remedy="start the program with flux run, or unset FLUX_TASK_RANK and FLUX_JOB_SIZE",
    EXAMPLES=(
        {
            "FLUX_TASK_RANK": "1",
            "FLUX_JOB_SIZE": "2",
            "FLUX_TASK_LOCAL_ID": "1",
            "FLUX_JOB_NNODES": "1",
            "FLUX_JOB_ID": "f3ETxsR9H",
        },
    ),
)

# LSB_MCPU_HOSTS is "host slots host slots ...", such as "batch2 1 c01n03 42 c01n04 42"
_PAIR = r"[A-Za-z0-9._-]{1,255}) +[0-9]{1,9}"
_HOSTS = re.compile(rf" *(?P<first>{_PAIR}(?: +(?P<second>{_PAIR}(?= |$)| *$)")


def _first_compute_host(env: Mapping[str, str]) -> str | None:
    """Return the host where jsrun begins to place tasks: the one after the host that it runs on."""
    match = _HOSTS.match(env.get("LSB_MCPU_HOSTS", ""))
    return None if match is None else match["second"] or match["first"]


# LSF's jsrun (the Job Step Manager of IBM's clusters).
#
# JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE are what jsrun sets in each task (Lightning
# documents them under `LSFEnvironment`); LSB_JOBID and LSB_MCPU_HOSTS are documented in IBM
# Spectrum LSF's "Environment variables set for job execution". LSB_DJOB_RANKFILE is not read: it is
# the name of a file with the hosts that LSB_MCPU_HOSTS lists. Of several jsrun at a time in one job
# each needs a MASTER_ADDR of its own. mpirun within an LSF job is found by the row of that MPI.
LSF = MpiEnvironment(
    "lsf",
    marks=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    rank=("JSM_NAMESPACE_RANK",),
    world_size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    job=("LSB_JOBID",),
    step=("PMIX_NAMESPACE",),
    first_host=_first_compute_host,
    remedy="start the program with jsrun, or unset the JSM_NAMESPACE variables",
    EXAMPLES=(
        {
            "LSB_MCPU_HOSTS": "batch2 1 c01n03 42 c01n04 42",
            "JSM_NAMESPACE_RANK": "6",
            "JSM_NAMESPACE_SIZE": "12",
            "JSM_NAMESPACE_LOCAL_SIZE": "6",
            "LSB_JOBID": "1201234",
            "PMIX_NAMESPACE": "3",
            "JSM_NAMESPACE_LOCAL_RANK": "0",
        },
    ),
)

# Cray's ALPS: aprun on XE, XK and XC systems; Cray EX has PALS or Slurm.
#
# ALPS_APP_PE is the rank and ALPS_APP_ID the id of the application: `aprun(1)`, and the aprun of
# PALS, which lists them as the older names of PALS_RANKID and PALS_APID (APRUN_ENV_ALIAS). aprun
# says neither the number of processes nor anything about the node: PMI_SIZE or WORLD_SIZE has to be
# given by hand (`aprun -n 8 -e PMI_SIZE=8 ...`); PMI_LOCAL_RANK and PMI_LOCAL_SIZE, HPE's names for
# the facts of the node, count where a wrapper exports them.
# PALS's aprun sets these variables too; they are left to PALS.
CRAY = MpiEnvironment(
    "cray",
    marks=("ALPS_APP_PE",),
    rank=("ALPS_APP_PE",),
    world_size=("PMI_SIZE", "WORLD_SIZE"),
    local_rank=("PMI_LOCAL_RANK",),
    local_world_size=("PMI_LOCAL_SIZE",),
    job=("ALPS_APP_ID",),
    owners=("PALS_RANKID",),
    remedy=(
        "give the number of processes by hand, as in aprun -n 8 -e PMI_SIZE=8, or unset the ALPS_ "
        "variables"
    ),
    EXAMPLES=(
        {
            "ALPS_APP_PE": "3",
            "PMI_SIZE": "8",
            "ALPS_APP_ID": "5494721",
        },
    ),
)
