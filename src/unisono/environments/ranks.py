"""Table of launchers that start ranks; each row detects its rank from the launcher's variables.

The comment above a row names the documentation of the variables, and the facts that none of them
has.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from unisono.environments.reader import Number, Reader, shown
from unisono.topology import RankInfo

Names: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True, slots=True)
class LauncherEnvironment:
    """A launcher, with a function that reads the variables of its ranks, and an example of them."""

    NAME: str
    remedy: str
    read: Callable[[Reader], RankInfo | None]
    EXAMPLES: tuple[Mapping[str, str]]

    def detect(self, env: Mapping[str, str]) -> RankInfo | None:
        """Return the facts of a rank of this launcher."""
        return self.read(Reader(env, self.NAME, self.remedy))


def _by_variables(
    reader: Reader,
    rank: Names,
    world_size: Names,
    local_rank: Names,
    local_world_size: Names = (),
    node_rank: Names = (),
    nnodes: Names = (),
) -> RankInfo:
    """Read each number from the first of its variables that is set."""
    return _make_info(
        reader,
        reader.needed(*rank),
        reader.needed(*world_size, least=1),
        reader.number(*local_rank),
        reader.number(*local_world_size, least=1),
        reader.number(*node_rank),
        reader.number(*nnodes, least=1),
    )


def _make_info(
    reader: Reader,
    rank: Number,
    world_size: Number,
    local_rank: Number | None,
    local_world_size: Number | None,
    node_rank: Number | None,
    nnodes: Number | None,
) -> RankInfo:
    """Check that the numbers are consistent, and derive the missing ones."""
    for number, limit in ((rank, world_size), (local_rank, local_world_size or world_size)):
        if number is not None:
            reader.below(number, limit.value, limit)
    if local_world_size is not None and local_world_size.value == world_size.value:
        nnodes = nnodes or Number(local_world_size.variable, 1)
        node_rank = node_rank or Number(local_world_size.variable, 0)
    if node_rank is not None:
        limit = nnodes or world_size  # a node has at least one rank
        reader.below(node_rank, limit.value, limit)
    # Each other node has at least one rank; without other nodes, this node has all ranks.
    here = 1 if local_world_size is None else local_world_size.value
    others = 0 if nnodes is None else nnodes.value - 1
    lacks_ranks = others == 0 and nnodes and local_world_size and here < world_size.value
    if here + others > world_size.value or lacks_ranks:
        found = [each for each in (local_world_size, nnodes, world_size) if each]
        numbers = " and ".join(map(str, found))
        message = f"{numbers} contradict each other: each node holds at least one of the replicas"
        raise reader.error(message, found[0].variable, str(found[0].value))
    if nnodes is not None and nnodes.value == 1:
        local_world_size, node_rank = world_size, Number(nnodes.variable, 0)
    return RankInfo(
        rank.value,
        world_size.value,
        _value(local_rank),
        _value(local_world_size),
        _value(node_rank),
        _value(nnodes),
        source=reader.source,
    )


def _value(number: Number | None) -> int | None:
    return None if number is None else number.value


def _with_rendezvous(
    reader: Reader, info: RankInfo, *ids: str | None, host: str | None = None
) -> RankInfo:
    """Add MASTER_ADDR and MASTER_PORT, by default `host` and a port derived from the job's ids."""
    # Without an id there are no defaults, because two jobs on one host would then meet.
    host = "127.0.0.1" if info.nnodes == 1 else host
    address, port = reader.address(), reader.port()
    if port is None and ids[0] is not None and (address or host):
        port = port_of(*filter(None, ids))
    return replace(
        info,
        master_addr=address or (host if port is not None else None),
        master_port=port,
        job_id=".".join(filter(None, ids)) or None,
    )


# Derived ports are below 29500, torch's own default, and below the ephemeral ports of every common
# system (on Linux from 32768), so that no outgoing connection occupies one by accident.
_FIRST_PORT = 20000
_N_PORTS = 9473  # a prime, so that neighbouring jobs and steps never share a port
_STRIDE = 97


def port_of(job: str, step: str = "0") -> int:
    """Derive the rendezvous port of a job, which is the same on every rank."""
    # Ids that are numbers are mapped so that 97 consecutive jobs with up to 97 steps each
    # have distinct ports; other ids are hashed.
    return _FIRST_PORT + (_number_of(job) * _STRIDE + _number_of(step)) % _N_PORTS


def _number_of(text: str) -> int:
    """Return an id as a number, or its hash."""
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    return zlib.crc32(text.encode("utf-8", "backslashreplace"))


def _torchrun(reader: Reader) -> RankInfo | None:
    """Read a rank's variables; return None if they are a node's."""
    if not reader.has("RANK", "WORLD_SIZE"):
        return None
    if not reader.has("LOCAL_RANK"):  # else RANK and WORLD_SIZE may count nodes
        counts_nodes = reader.counts_nodes()
        if counts_nodes:
            return None
        if counts_nodes is None:  # the user hasn't stated it
            _refuse_both_meanings(reader)
    info = _by_variables(
        reader,
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        nnodes=("GROUP_WORLD_SIZE",),
    )
    run_id = reader.value("TORCHELASTIC_RUN_ID")
    return replace(
        info,
        master_addr=reader.address(),
        master_port=reader.port(),
        store_is_hosted=_store_is_hosted(reader),
        # These don't identify a job: torchrun's id of every static rendezvous, and the id that
        # unisono's launcher passes for every elastic rendezvous.
        job_id=None if run_id in ("none", "unisono") else run_id,
    )


def _refuse_both_meanings(reader: Reader) -> None:
    """Raise if RANK counts nodes and WORLD_SIZE counts ranks."""
    rank, size = reader.value("RANK"), reader.value("WORLD_SIZE")
    node_rank, nnodes = reader.value("PET_NODE_RANK"), reader.value("PET_NNODES")
    if rank is None or size is None or node_rank is None or nnodes is None:
        return
    # Kubeflow's PyTorchJob sets them so if its nprocPerNode is a number.
    if rank == node_rank and nnodes.isdecimal() and nnodes != size:
        message = (
            f"RANK={shown(rank)} counts nodes, as PET_NODE_RANK does, but "
            f"WORLD_SIZE={shown(size)} isn't PET_NNODES={shown(nnodes)}: it counts ranks, "
            "which unisono run or Parallel must still start"
        )
        raise reader.error(message, "WORLD_SIZE", size)


def _store_is_hosted(reader: Reader) -> bool:
    """Return whether torchrun's agent already runs the store at MASTER_ADDR and MASTER_PORT."""
    # torch compares with str(True), so any other text means no.
    if reader.value("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not reader.has(name):
            message = f"{name} is not set, but TORCHELASTIC_USE_AGENT_STORE=True means that a store"
            raise reader.error(f"{message} listens there", name, None)
    return True


_LAST_STEP_ID = 0xFFFFFFF0
_LAST_ID = 2**32 - 1
# mpirun, mpiexec and Flux start their daemons as the tasks of a step. The ranks of a daemon have
# their launcher's variables, and inherit SLURM_PROCID. srun --mpi=pmi2 sets PMI_RANK alone.
_INNER_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK",),
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK",),
    ("FLUX_TASK_RANK",),
)


def _slurm(reader: Reader) -> RankInfo | None:
    # Another launcher runs in the step: its rank has inherited the variables of a task.
    if any(all(map(reader.has, names)) for names in _INNER_LAUNCHERS):
        return None
    numbers = map(reader.number, ("SLURM_PROCID", "SLURM_LOCALID"))
    is_task = any(number and number.value for number in numbers)  # a batch script has 0 in both
    read = reader.needed if is_task else reader.number  # a task without a step is an error
    step = read("SLURM_STEP_ID", "SLURM_STEPID", most=_LAST_ID)
    if step is None or step.value > _LAST_STEP_ID:
        return None  # a batch script, or a shell of salloc
    job = reader.needed("SLURM_JOB_ID", "SLURM_JOBID", most=_LAST_ID)
    world_size = reader.needed("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    node_rank = reader.needed("SLURM_NODEID")
    nnodes = reader.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1)
    info = _make_info(
        reader,
        reader.needed("SLURM_PROCID"),
        world_size,
        reader.needed("SLURM_LOCALID"),
        _count_tasks_here(reader, world_size, node_rank, nnodes),
        node_rank,
        nnodes,
    )
    return replace(
        info,
        master_addr=reader.address() or _first_host(reader, nnodes),
        master_port=reader.port() or port_of(str(job.value), str(step.value)),
        job_id=f"{job.value}.{step.value}",
    )


# `scontrol(1)` ("show hostnames") and `slurm.conf(5)` document lists of hosts: n[08-10,12],login-1
# is n08, n09, n10, n12 and login-1. An item consists of texts and of ranges in brackets, and ends
# at a comma outside of brackets.
_FIRST_ITEM = re.compile(
    r"(?P<item>(?:[A-Za-z0-9._-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+)(?:,|$)"
)
_RANGES = re.compile(r"\[([0-9]+)[0-9,-]*\]")


def _first_host(reader: Reader, nnodes: Number | None) -> str | None:
    """Return the host of task 0, the first in the list of hosts; None if it is unknown."""
    if reader.value("SLURM_DISTRIBUTION") == "arbitrary" and not (nnodes and nnodes.value == 1):
        return None  # task 0 may be on any node
    nodelist = reader.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if nodelist is None:
        message = "SLURM_STEP_NODELIST is not set, and neither is MASTER_ADDR"
        raise reader.error(message, "SLURM_STEP_NODELIST", None)
    name, value = nodelist
    item = _FIRST_ITEM.match(value)
    if item is None:
        raise reader.error(f"{name}={shown(value)} is not a list of hosts", name, value)
    # The first number of each range belongs to the first host.
    return reader.host(name, _RANGES.sub(r"\1", item["item"]))


# SLURM_STEP_TASKS_PER_NODE "2(x3),1" means three nodes with two tasks each, then one with one task.
_RUN = re.compile(r"(?P<tasks>[0-9]{1,9})(?:\(x(?P<nodes>[0-9]{1,9})\))?")


def _count_tasks_here(
    reader: Reader, world_size: Number, node_rank: Number, nnodes: Number | None
) -> Number | None:
    """Return the number of tasks on this node, which may differ between nodes."""
    variable = reader.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if variable is None:
        return None
    name, value = variable
    here, nodes, tasks = None, 0, 0
    for run in value.split(","):
        match = _RUN.fullmatch(run)
        if match is None:
            message = f"{name}={shown(value)} is not of the form '2(x3),1'"
            raise reader.error(message, name, value)
        each, times = int(match["tasks"]), int(match["nodes"] or 1)
        if nodes <= node_rank.value < nodes + times:
            here = each
        nodes, tasks = nodes + times, tasks + each * times
    agrees = tasks == world_size.value and (nnodes is None or nodes == nnodes.value)
    if here is None or not agrees:
        numbers = f"{world_size}, {node_rank}" + (f", {nnodes}" if nnodes else "")
        message = f"{name}={shown(value)}, {tasks} tasks on {nodes} nodes, contradicts {numbers}"
        raise reader.error(message, name, value)
    return Number(name, here)


def _case(text: str) -> tuple[dict[str, str]]:
    """Parse ``NAME=value; NAME=value``."""
    return (dict(pair.split("=", 1) for pair in text.split("; ")),)


# Facts of the rank in the examples that `_mpi` builds.
(_FACTS,) = _case("rank=1; world_size=2; local_rank=1; local_world_size=2; node_rank=0; nnodes=1")


def _mpi(
    name: str,
    remedy: str,
    job: Names = (),
    marks: Names = (),
    owners: Names = (),
    **numbers: Names,
) -> LauncherEnvironment:
    """Build a row; if a variable in `owners` is set, another launcher has started the rank."""
    marks = marks or (*numbers["rank"], *numbers["world_size"])

    def read(reader: Reader) -> RankInfo | None:
        if reader.has(*owners) or not reader.has(*marks):
            return None
        return _with_rendezvous(reader, _by_variables(reader, **numbers), reader.value(*job))

    example = {names[0]: _FACTS[fact] for fact, names in numbers.items()}
    if job:
        example[job[0]] = "1550319617"  # any id will do
    return LauncherEnvironment(name, remedy, read, (example,))


def _lsf(reader: Reader) -> RankInfo | None:
    """Read a rank of jsrun."""
    if not reader.has("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"):
        return None
    info = _by_variables(
        reader,
        rank=("JSM_NAMESPACE_RANK",),
        world_size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
    )
    # LSB_MCPU_HOSTS "batch2 1 c01n03 42 c01n04 42" lists hosts and slots. jsrun runs on the first
    # host, and starts tasks on the following hosts, or on the first if it is the only one.
    hosts = (reader.value("LSB_MCPU_HOSTS") or "").split()[:4:2]  # without the slots
    host = reader.host("LSB_MCPU_HOSTS", hosts[-1]) if hosts else None
    ids = (reader.value("LSB_JOBID"), reader.value("PMIX_NAMESPACE"))
    return _with_rendezvous(reader, info, *ids, host=host)


# In order of priority: torchrun first, since it runs inside the steps and jobs of all others.
LAUNCHERS: tuple[LauncherEnvironment, ...] = (
    # torchrun, and launchers that set the same variables: SageMaker (torch_distributed),
    # accelerate, DeepSpeed, and Kubeflow's PyTorchJob, where RANK counts pods. Documented in
    # PyTorch's "torchrun (Elastic Launch)", section "Environment Variables", except for
    # TORCHELASTIC_USE_AGENT_STORE, which `torch/distributed/rendezvous.py` reads.
    LauncherEnvironment(
        "torchrun",
        "start the program with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
        "together, or unset them all",
        _torchrun,
        _case(
            "RANK=2; WORLD_SIZE=4; LOCAL_RANK=1; LOCAL_WORLD_SIZE=3; GROUP_RANK=1; "
            "GROUP_WORLD_SIZE=2; MASTER_ADDR=localhost; MASTER_PORT=42423; "
            "TORCHELASTIC_USE_AGENT_STORE=True; TORCHELASTIC_RUN_ID=b5a7"
        ),
    ),
    # A task of a Slurm step: `srun(1)`, "OUTPUT ENVIRONMENT VARIABLES". A batch script and the
    # shell of salloc have variables such as SLURM_NTASKS=4 (the script even SLURM_PROCID=0), but
    # aren't tasks: their SLURM_STEP_ID is missing, or one of the ids above 0xfffffff0 that Slurm
    # keeps for itself.
    LauncherEnvironment(
        "slurm",
        "start the program with srun, which sets them all, or unset the SLURM_ variables",
        _slurm,
        _case(
            "SLURM_STEP_ID=0; SLURM_JOB_ID=2; SLURM_STEP_NUM_TASKS=4; SLURM_NODEID=0; "
            "SLURM_STEP_NUM_NODES=2; SLURM_PROCID=2; SLURM_LOCALID=2; "
            "SLURM_STEP_TASKS_PER_NODE=3,1; SLURM_STEP_NODELIST=n[1-2]"
        ),
    ),
    # Open MPI: docs.open-mpi.org/en/main/tuning-apps/environment-var.html. This row doesn't read
    # OMPI_COMM_WORLD_NODE_RANK, because it counts the processes of all jobs on the node.
    # PMIX_NAMESPACE is the job's id, a new one for each mpirun; before PMIx, the id was
    # OMPI_MCA_ess_base_jobid. No variable has the address for a job of several nodes; the user
    # passes one with `mpirun -x MASTER_ADDR`.
    _mpi(
        "openmpi",
        "start the program with Open MPI's mpirun, or unset the OMPI_COMM_WORLD variables",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        owners=("JSM_NAMESPACE_RANK",),
    ),
    # Flux: `flux-environment(7)`. It sets PMI_RANK and PMI_SIZE too. No variable has the hosts or
    # the number of tasks on a node. The user passes the first host with
    # `flux run --env=MASTER_ADDR=$(flux hostlist --nth=0)`.
    _mpi(
        "flux",
        "start the program with flux run, or unset FLUX_TASK_RANK and FLUX_JOB_SIZE",
        rank=("FLUX_TASK_RANK",),
        world_size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        nnodes=("FLUX_JOB_NNODES",),
        job=("FLUX_JOB_ID",),
        owners=("OMPI_COMM_WORLD_RANK",),
    ),
    # MPICH, Intel MPI, and other launchers that speak PMI: MPICH's "PMI-2 Wire Protocol".
    # MPI_LOCALRANKID and MPI_LOCALNRANKS are undocumented; they were observed in MPICH 5.0 and
    # Intel MPI 2021. HPE's PMI has PMI_LOCAL_RANK and PMI_LOCAL_SIZE instead (`pals.h`).
    # I_MPI_HYDRA_UUID is Intel MPI's id of the job. MPICH has no id, so there the user passes
    # `mpiexec -genv MASTER_ADDR host -genv MASTER_PORT port`.
    _mpi(
        "mpich",
        "start the program with mpiexec of MPICH or Intel MPI, or unset the PMI_ variables",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("I_MPI_HYDRA_UUID",),
        owners=("MV2_COMM_WORLD_RANK", "PALS_RANKID", "ALPS_APP_PE", "FLUX_TASK_RANK"),
    ),
    # MVAPICH2's mpirun_rsh: MVAPICH2's User Guide. MPICH's row detects MVAPICH 3. No variable is an
    # id of the job, so the user passes the address and the port:
    # `mpirun_rsh -np 4 MASTER_ADDR=host MASTER_PORT=port ./program`.
    _mpi(
        "mvapich",
        "start the program with MVAPICH2's mpirun_rsh, or unset the MV2_COMM_WORLD variables",
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    # PALS on HPE Cray EX, which provides mpiexec and aprun under PBS: `pals.h`, and PALS's own
    # `mpiexec(1)`. PMI_SIZE has the number of processes, but only with `--pmi=cray`; else the user
    # sets PALS_SIZE, PMI_SIZE or WORLD_SIZE. For several nodes the user also sets MASTER_ADDR.
    # Slurm's `srun --mpi=cray_shasta` sets some of these variables too.
    _mpi(
        "pals",
        "start the program with PALS's mpiexec --pmi=cray, or give the number of processes by hand "
        "as in mpiexec --env PMI_SIZE=8, or unset the PALS_ variables",
        rank=("PALS_RANKID",),
        world_size=("PALS_SIZE", "PMI_SIZE", "WORLD_SIZE"),
        local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        job=("PALS_APID",),
        marks=("PALS_RANKID",),
        owners=("SLURM_STEP_ID", "SLURM_STEPID"),
    ),
    # LSF's jsrun: Lightning's `LSFEnvironment` documents the JSM_ variables, IBM Spectrum LSF's
    # "Environment variables set for job execution" the LSB_ variables. If one job runs several
    # jsrun at a time, each needs a MASTER_ADDR. An mpirun within an LSF job is detected by the row
    # of its MPI.
    LauncherEnvironment(
        "lsf",
        "start the program with jsrun, or unset the JSM_NAMESPACE variables",
        _lsf,
        _case(
            "LSB_MCPU_HOSTS=batch2 1 c01n03 42 c01n04 42; JSM_NAMESPACE_RANK=6; "
            "JSM_NAMESPACE_SIZE=12; JSM_NAMESPACE_LOCAL_SIZE=6; LSB_JOBID=1201234; "
            "PMIX_NAMESPACE=3; JSM_NAMESPACE_LOCAL_RANK=0"
        ),
    ),
    # Cray's ALPS, which provides aprun on XE, XK and XC: `aprun(1)`. The user has to set the number
    # of processes, as PMI_SIZE or WORLD_SIZE. The row also reads facts about the node, which a
    # wrapper may export. The aprun of PALS sets these variables too.
    _mpi(
        "cray",
        "give the number of processes by hand, as in aprun -n 8 -e PMI_SIZE=8, or unset the ALPS_ "
        "variables",
        rank=("ALPS_APP_PE",),
        world_size=("PMI_SIZE", "WORLD_SIZE"),
        local_rank=("PMI_LOCAL_RANK",),
        local_world_size=("PMI_LOCAL_SIZE",),
        job=("ALPS_APP_ID",),
        marks=("ALPS_APP_PE",),
        owners=("PALS_RANKID",),
    ),
)
