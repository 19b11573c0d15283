"""What the launchers of MPI have in common: rank, size and their local twins, by other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.environments.reader import Reader, Said, make_info, port_of
from unisono.topology import RankInfo

__all__ = ("Names", "read_mpi")


@dataclass(frozen=True, slots=True)
class Names:
    """The variables of one launcher; of several for one fact the first that is set counts.

    Args:
        marks: at least one of these is set in each of its processes.
        rank: global rank.
        world_size: number of processes.
        local_rank: rank within the node.
        local_world_size: processes on this node.
        node_rank: rank of the node.
        job: an id that all ranks share and that no other job on these hosts has.
        step: an id within the job.
    """

    marks: tuple[str, ...]
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    job: tuple[str, ...] = ()
    step: tuple[str, ...] = ()


def read_mpi(
    env: Mapping[str, str], source: str, names: Names, remedy: str, *, first_host: str | None = None
) -> RankInfo | None:
    """Read the variables of an MPI launcher.

    Local. MASTER_ADDR and MASTER_PORT count where they are set. Else the address is 127.0.0.1
    where all processes are on this node, `first_host` elsewhere, and the port is derived from the
    id of the job. Without such an id there is neither: two jobs on one host would meet.

    Args:
        env: the variables.
        source: name of the environment.
        names: its variables.
        remedy: what to do where they are wrong.
        first_host: host of rank 0 in a job of several nodes, where it is known.

    Returns:
        The facts; None if none of the launcher's marks is set.

    Raises:
        EnvironmentDetectionError: they are partial, malformed or contradict each other.
    """
    reader = Reader(env, source, remedy)
    if not reader.has(*names.marks):
        return None
    return make_info(reader, _said(reader, names, first_host))


def _said(reader: Reader, names: Names, first_host: str | None) -> Said:
    rank = reader.needed(*names.rank)
    world_size = reader.needed(*names.world_size, least=1)
    local_world_size = reader.number(*names.local_world_size, least=1)
    is_one_node = local_world_size is not None and local_world_size.value == world_size.value
    address, port = _rendezvous(reader, names, "127.0.0.1" if is_one_node else first_host)
    return Said(
        rank,
        world_size,
        local_rank=reader.number(*names.local_rank),
        local_world_size=local_world_size,
        node_rank=reader.number(*names.node_rank),
        master_addr=address,
        master_port=port,
        job_id=_job_id(reader, names),
    )


def _job_id(reader: Reader, names: Names) -> str | None:
    found = [reader.text(*names.job), reader.text(*names.step)]
    return ".".join(each[1] for each in found if each is not None) or None


def _rendezvous(reader: Reader, names: Names, host: str | None) -> tuple[str | None, int | None]:
    address, port, job = reader.address(), reader.port(), reader.text(*names.job)
    if port is None and job is not None and (address or host):
        step = reader.text(*names.step)
        port = port_of(job[1], "0" if step is None else step[1])
    return address or (host if port is not None else None), port
