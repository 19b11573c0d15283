"""Slurm: one task of a step that srun started.

The variables are documented in ``srun(1)``, "OUTPUT ENVIRONMENT VARIABLES"; what they hold was
recorded from Slurm 22.05. Only those of the step count. A batch script and the shell of salloc
carry SLURM_NTASKS=4 (the script even SLURM_PROCID=0), but aren't tasks: they lack SLURM_STEP_ID, or
it is one of the ids above 0xfffffff0 that Slurm keeps for itself, such as 0xfffffffa for the shell
of ``salloc`` with ``LaunchParameters=use_interactive_step``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from unisono.environments.hostlist import Hostlist, parse_hostlist
from unisono.environments.reader import Number, Reader, UncheckedInfo, make_info, port_of, shown
from unisono.topology import RankInfo

NAME = "slurm"
EXAMPLES = (
    {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "3,1",
        "SLURM_STEP_NODELIST": "n[1-2]",
    },
)
_REMEDY = "start the program with srun, which sets them all, or unset the SLURM_ variables"
_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
_DISTRIBUTION = "SLURM_DISTRIBUTION"
_LAST_STEP = 0xFFFFFFF0
_ANY_ID = 2**32 - 1
# SLURM_STEP_TASKS_PER_NODE is "2(x3),1": three nodes with two tasks each, then one with one
_RUN = re.compile(r"(?P<tasks>[0-9]{1,9})(?:\(x(?P<nodes>[0-9]{1,9})\))?")
# mpirun, mpiexec and Flux start their daemons as the tasks of a step; the ranks below a daemon
# inherit its SLURM_PROCID beside variables of their own.
_INNER_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK",),
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("MV2_COMM_WORLD_RANK",),
    ("FLUX_TASK_RANK",),
)


def detect(env: Mapping[str, str]) -> RankInfo | None:
    """Read the variables of a task of a Slurm step."""
    # MASTER_ADDR and MASTER_PORT count where they are set; else the address is the first host of
    # the step and the port is derived from the ids of job and step. With
    # ``--distribution=arbitrary`` on several nodes task 0 may be on any of them: without
    # MASTER_ADDR there is no address then.
    reader = Reader(env, NAME, _REMEDY)
    if any(all(map(reader.has, names)) for names in _INNER_LAUNCHERS):
        return None
    numbers = map(reader.number, ("SLURM_PROCID", "SLURM_LOCALID"))
    is_task = any(number and number.value for number in numbers)  # a batch script has 0 in both
    step = (reader.needed if is_task else reader.number)(*_STEP, most=_ANY_ID)
    if step is None or step.value > _LAST_STEP:
        return None
    return make_info(reader, _unchecked(reader, step))


def _unchecked(reader: Reader, step: Number) -> UncheckedInfo:
    job = reader.needed("SLURM_JOB_ID", "SLURM_JOBID", most=_ANY_ID)
    world_size = reader.needed("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", least=1)
    node_rank = reader.needed("SLURM_NODEID")
    nnodes = reader.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", least=1)
    return UncheckedInfo(
        reader.needed("SLURM_PROCID"),
        world_size,
        local_rank=reader.needed("SLURM_LOCALID"),
        local_world_size=_local_world_size(reader, world_size, node_rank, nnodes),
        node_rank=node_rank,
        nnodes=nnodes,
        master_addr=reader.address() or _first_host(reader, nnodes),
        master_port=reader.port() or port_of(str(job.value), str(step.value)),
        job_id=f"{job.value}.{step.value}",
    )


def _first_host(reader: Reader, nnodes: Number | None) -> str | None:
    if reader.text(_DISTRIBUTION) == (_DISTRIBUTION, "arbitrary") and not (
        nnodes and nnodes.value == 1
    ):
        return None
    nodelist = reader.text(*_NODELISTS)
    if nodelist is None:
        message = f"{_NODELISTS[0]} is not set, and neither is MASTER_ADDR"
        raise reader.error(message, _NODELISTS[0], None)
    name, value = nodelist
    hosts = _hosts(reader, name, value)
    if nnodes is not None and hosts.count() != nnodes.value:
        message = f"{name}={shown(value)} names {hosts.count()} hosts, but {nnodes}"
        raise reader.error(message, name, value)
    return hosts.first()


def _hosts(reader: Reader, name: str, value: str) -> Hostlist:
    try:
        return parse_hostlist(value)
    except ValueError as error:
        message = f"{name}={shown(value)} is not a list of hosts: {error}"
        raise reader.error(message, name, value) from error


def _local_world_size(
    reader: Reader, world_size: Number, node_rank: Number, nnodes: Number | None
) -> Number | None:
    """Count the tasks on this node; nodes may hold different numbers of them."""
    variable = reader.text(*_TASKS_PER_NODE)
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
        others = f"{world_size}, {node_rank}" + (f", {nnodes}" if nnodes else "")
        message = f"{name}={shown(value)}, {tasks} tasks on {nodes} nodes, contradicts {others}"
        raise reader.error(message, name, value)
    return Number(name, here)
