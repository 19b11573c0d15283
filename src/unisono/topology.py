"""Frozen facts: a replica's ranks, its launcher's description, the ranks of a group."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import gethostname
from typing import TypeVar

V = TypeVar("V")
EVERYBODY = "all ranks"
"""Name of the group of all ranks, which every context has."""
PREFIXED = "UNISONO_PREFIXED"
"""Variable that is set if a launcher prefixes a process's lines with the rank already."""
GRACE_S = 30.0
"""Seconds for ranks to save after a SIGTERM; torchrun gives its ranks as many."""
PRIVATE_STORE = "UNISONO_PRIVATE_STORE"
"""Variable with the path of the rendezvous file of one host, which only its user can open."""


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def boot_id() -> str:
    """Return an id of the running kernel, whose processes share one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return gethostname()


def pid_namespace() -> str:
    """Return an id of the namespace of this process's pid, empty if unknown."""
    # Outside of containers, the number in the link is the same on all hosts.
    with contextlib.suppress(OSError):  # Linux only
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    return ""


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of one replica in its job and on its node.

    Args:
        rank: global rank, 0 to ``world_size - 1``.
        world_size: number of replicas in the job.
        local_rank: rank within the node; None if unknown without communication.
        local_world_size: number of replicas on this node; None if unknown.
        node_rank: rank of this node; None if unknown.
        nnodes: number of nodes; None if unknown.
        is_guess: whether the facts about nodes were guessed.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    nnodes: int | None = None
    is_guess: bool = False

    def size(self, group: Group | None) -> int:
        """Return the number of ranks that take part; None stands for all ranks."""
        return self.world_size if group is None else len(group.ranks)

    def members(self, group: Group | None) -> tuple[int, ...] | range:
        """Return the global ranks that take part."""
        return range(self.world_size) if group is None else group.ranks

    def position(self, group: Group | None, rank: int | None = None) -> int:
        """Return the position of a global rank, or of this replica, in a group."""
        rank = self.rank if rank is None else rank
        return rank if group is None else group.ranks.index(rank)

    def among(self, hosts: Sequence[bytes]) -> Topology:
        """Fill in the facts about nodes from the hosts of all ranks.

        Args:
            hosts: by rank; equal for ranks of one node.

        Returns:
            A copy, in which `hosts` replace unknown and guessed facts.
        """
        nodes = list(dict.fromkeys(hosts))  # in the order of their first ranks
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        measured = Topology(
            self.rank,
            self.world_size,
            here.index(self.rank),
            len(here),
            nodes.index(hosts[self.rank]),
            len(nodes),
        )
        return measured if self.is_guess else self.or_else(measured)

    def or_else(self, other: Topology | RankInfo) -> Topology:
        """Fill in unknown facts from `other`."""
        names = ("local_rank", "local_world_size", "node_rank", "nnodes")
        unknown = {name: getattr(other, name) for name in names if getattr(self, name) is None}
        return replace(self, **unknown)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Facts of a launcher or an environment about one replica.

    Args:
        rank: global rank.
        world_size: number of replicas in the job.
        local_rank: rank within the node; None if unknown.
        local_world_size: replicas on this node; None if unknown.
        node_rank: rank of this node; None if unknown.
        nnodes: number of nodes; None if unknown.
        master_addr: host of the rendezvous; None if unknown.
        master_port: TCP port of the rendezvous; None if unknown.
        source: its origin: ``"arguments"``, ``"torchrun"``, ``"slurm"``, ``"spawn"``, ...
        store_is_hosted: a ``torch.distributed.TCPStore`` already listens at that address and port,
            so every rank, 0 too, joins it as a client.
        private_store: path of the rendezvous file of a job of one host, which only its user can
            open; None if there is none.
        job_id: identifies the job, also among those that use the same server; the same on every
            rank. None if unknown.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    nnodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str = "arguments"
    store_is_hosted: bool = False
    private_store: str | None = None
    job_id: str | None = None

    def core_share(self) -> int:
        """Return this replica's share of the cores that this process may run on, at least 1.

        With more threads than cores a parallel loop of torch takes ten times as long, or longer.
        """
        return max(1, usable_cores() // (self.local_world_size or 1))

    def topology(self) -> Topology:
        """Return the same facts without the rendezvous.

        Returns:
            The replica's topology; nothing is unknown for a replica that is alone.
        """
        topology = Topology(self.rank, self.world_size).or_else(self)
        alone = Topology(0, 1, local_rank=0, local_world_size=1, node_rank=0, nnodes=1)
        return topology.or_else(alone) if self.world_size == 1 else topology


@dataclass(frozen=True, slots=True)
class ContextHint:
    """External facts about a context created outside unisono.

    Args:
        local_rank: the argument of ``set_local_rank``, else None.
        environment: facts from the process's variables, else None.
    """

    local_rank: int | None = None
    environment: RankInfo | None = None


@dataclass(frozen=True, eq=False)  # without slots, which would rule out weak references
class Group:
    """Some ranks of one context, in an order of their own.

    Args:
        ranks: global ranks of the members: ascending, unless torch's own group has another order.
        handle: the model's own object, such as a ``torch.distributed.ProcessGroup``; may be None
            on a rank that isn't a member.
        name: distinguishes it from every other group of its context, even of the same ranks; the
            same on all of its ranks. If empty, it is derived from the ranks.
        timeout_s: seconds that a collective over it may take; None for the job's.
        context_id: identity of the context that it belongs to, which the facade fills in.
    """

    ranks: tuple[int, ...]
    handle: object = field(default=None, repr=False)
    name: str = field(default="", repr=False)
    timeout_s: float | None = field(default=None, repr=False)
    context_id: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Set the name of a group without one."""
        if not self.name:
            object.__setattr__(self, "name", str(self.ranks))

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def of_context(self, context_id: int) -> Group:
        """Record the context that the group belongs to, and return the group."""
        object.__setattr__(self, "context_id", context_id)
        return self

    def __eq__(self, other: object) -> bool:
        """Compare by identity; a list of the same ranks is equal, too."""
        # In a serial context, ignite's `new_group` returns such a list.
        return self is other or (isinstance(other, list) and other == list(self.ranks))

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def position(self, rank: int) -> int:
        """Return the position of a global rank in the group.

        Args:
            rank: a global rank that is a member.

        Returns:
            0 to ``size - 1``.

        Raises:
            ValueError: the rank isn't a member.
        """
        return self.ranks.index(rank)


def named(ranks: Iterable[int]) -> str:
    """Return ranks as text, as in "rank 1" or "ranks 0-3, 7"."""
    numbers = sorted(set(ranks))
    parts: list[str] = []
    # In a run of numbers, all have the same distance from their positions.
    for _, pairs in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"


def ranks_by_value(values: Mapping[int, V]) -> dict[V, list[int]]:
    """Return the ranks that have each value, in the order of the values' first ranks."""
    found: dict[V, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found


def name_of(group: Group | None) -> str:
    """Return the name of a group; None stands for all ranks."""
    return EVERYBODY if group is None else group.name


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Facts of a platform about one node of a job, whose ranks have yet to be started."""

    node_rank: int | None
    nnodes: int
    max_nnodes: int
    master_addr: str | None
    master_port: int
    nproc_per_node: str | None
    source: str
    is_ambiguous: bool = False
    hosts: tuple[str, ...] = ()
    max_restarts: int | None = None


_PAIR = re.compile(r"rank ([0-9]+) to rank ([0-9]+)")


def pair(src: int, dst: int) -> Group:
    """Return a group that represents the two ranks of a message."""
    # Only the name shows the direction, as a group's ranks are ascending.
    return Group((min(src, dst), max(src, dst)), name=f"rank {src} to rank {dst}")


def members_of_pair(name: str) -> tuple[int, ...]:
    """Return the ranks of the pair with this name; none for any other group's name."""
    found = _PAIR.fullmatch(name)
    return tuple(sorted(map(int, found.groups()))) if found else ()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The number of replicas that a launcher starts, and their rendezvous.

    Args:
        nproc_per_node: replicas on this node, at least 1.
        nnodes: nodes in the job; every node runs the same call.
        node_rank: rank of this node.
        master_addr: host that node 0 listens on; needed if ``nnodes`` is over 1.
        master_port: TCP port there; needed if ``nnodes`` is over 1.
        init_method: a rendezvous URL for the model to use instead; None for the launcher's own.
        start_method: how processes are started; None for the launcher's best.
        backend: the backend, if the model itself launches; empty for launchers.
        store_is_hosted: a ``torch.distributed.TCPStore`` already listens at ``master_addr`` and
            ``master_port``: see `unisono.rendezvous.host_store`.
        private_store: path of the rendezvous file of a job of one host; None for none.
        job_id: identifies the job; None if nodes are started one by one.
        grace_s: seconds for replicas to save after a SIGTERM to the process that started them;
            0 for none.
    """

    nproc_per_node: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    init_method: str | None = None
    start_method: str | None = None
    backend: str = ""
    store_is_hosted: bool = False
    private_store: str | None = None
    job_id: str | None = None
    grace_s: float = GRACE_S

    @property
    def world_size(self) -> int:
        """Number of replicas in the whole job."""
        return self.nproc_per_node * self.nnodes

    def info(self, local_rank: int) -> RankInfo:
        """Return the ranks and the rendezvous of replica `local_rank` of this node.

        Args:
            local_rank: 0 to ``nproc_per_node - 1``.

        Returns:
            Its ranks, and the rendezvous of the plan.
        """
        return RankInfo(
            rank=self.node_rank * self.nproc_per_node + local_rank,
            world_size=self.world_size,
            local_rank=local_rank,
            local_world_size=self.nproc_per_node,
            node_rank=self.node_rank,
            nnodes=self.nnodes,
            master_addr=self.master_addr,
            master_port=self.master_port,
            source="spawn",
            store_is_hosted=self.store_is_hosted,
            private_store=self.private_store,
            job_id=self.job_id,
        )
