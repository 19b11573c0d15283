"""Rendezvous of a job's ranks, for authors of launchers and of models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from unisono.launchers.job.store import hold
from unisono.models.native.rendezvous import Rendezvous
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("JobStore", "host_store", "join_store")


@contextlib.contextmanager
def host_store(plan: LaunchPlan, address: str | None = None) -> Iterator[LaunchPlan]:
    """Host the rendezvous store of a job while the block runs.

    For launchers without a rendezvous of their own. If all ranks are on this host, the store
    listens on the loopback at a port chosen by the kernel, and ranks of unisono's models use
    a file instead, which only their user can open.

    Args:
        plan: the number of ranks; on several nodes with the address of node 0.
        address: name or address of this host, for ranks on other hosts; None if all ranks of a
            plan of one node are on this host.

    Yields:
        The plan with the rendezvous filled in: pass ``plan.info(local_rank)`` to each rank.

    Raises:
        LaunchError: this process can't listen there.

    Example:
        >>> from unisono import LaunchPlan
        >>> with host_store(LaunchPlan(nproc_per_node=2)) as plan:
        ...     info = plan.info(local_rank=1)
        >>> info.rank, info.world_size, info.master_addr, info.store_is_hosted
        (1, 2, '127.0.0.1', True)
    """
    with ExitStack() as held:
        if address is not None:
            # A plan of several nodes makes the store listen for other hosts.
            several = replace(plan, nnodes=max(2, plan.nnodes), master_addr=address)
            yield replace(hold(several, held), nnodes=plan.nnodes)
            return
        yield hold(plan, held)


@dataclass(frozen=True, slots=True)
class JobStore:
    """A store that all ranks of a job have reached.

    Args:
        store: the job's own part of the store; other jobs can't use its keys.
        secret: known only to ranks of this job; None if strangers can reach the store, too, as
            with several hosts, or with a launcher that hosts its own.
    """

    store: Store
    secret: bytes | None = None


def join_store(info: RankInfo, timeout: timedelta | None = None) -> JobStore:
    """Wait for all ranks in the job's store.

    Collective over all ranks of `info`. For models without a rendezvous of their own: each rank
    writes its address into the store, and reads those of the others.

    Args:
        info: this rank, as passed to `initialize` of a model.
        timeout: for all ranks to arrive; None for 60 s.

    Returns:
        The store, and the job's secret if there is one. Keep it as long as the model: rank 0
        may host the store, which ends with the last reference to it.

    Raises:
        ContextError: there is no address, no listener, or not all ranks arrived.

    Example:
        >>> from unisono import RankInfo
        >>> job = join_store(RankInfo(rank=0, world_size=1))
        >>> job.store.set("address", "tcp://127.0.0.1:7")
        >>> job.store.get("address")
        b'tcp://127.0.0.1:7'
    """
    rendezvous = Rendezvous(info, timeout)
    store = rendezvous.store()
    return JobStore(store, rendezvous.secret)
