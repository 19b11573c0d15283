"""Where the ranks of a job meet: for authors of launchers and of models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from unisono.launchers.job.store import hold, private_store
from unisono.models.native.rendezvous import Rendezvous
from unisono.topology import PRIVATE_STORE, LaunchPlan, RankInfo

__all__ = ("JobStore", "host_store", "join_store")


@contextlib.contextmanager
def host_store(plan: LaunchPlan, address: str | None = None) -> Iterator[LaunchPlan]:
    """Host the store that the ranks of a job meet at, for as long as the block lasts.

    Local. The call of a launcher that has no other way to let its ranks meet. Where all ranks are
    on this host the store listens on the loopback at a port of the kernel's choice, and there is a
    file besides that their user alone can open: ranks of unisono's models meet there.

    Args:
        plan: how many ranks there are; on several nodes with the address of node 0.
        address: name or address of this host under which ranks on other hosts reach it; None where
            all ranks of a plan of one node are on this host.

    Yields:
        The plan with all that its `info` needs: hand ``plan.info(local_rank)`` to each rank.

    Raises:
        LaunchError: nobody can listen there.

    Example:
        >>> from unisono import LaunchPlan
        >>> with host_store(LaunchPlan(nproc_per_node=2)) as plan:
        ...     info = plan.info(local_rank=1)
        >>> info.rank, info.world_size, info.master_addr, info.store_is_hosted
        (1, 2, '127.0.0.1', True)
    """
    with ExitStack() as held:
        if address is not None:
            # Of several nodes, it listens for others; ranks are told where.
            several = replace(plan, nnodes=max(2, plan.nnodes), master_addr=address)
            yield replace(hold(several, held), nnodes=plan.nnodes)
            return
        hosted = hold(plan, held)
        if hosted.store_is_hosted and plan.nnodes == 1:
            hosted = replace(hosted, private_store=private_store(held)[PRIVATE_STORE])
        yield hosted


@dataclass(frozen=True, slots=True)
class JobStore:
    """A store that all ranks of a job have reached.

    Args:
        store: the job's own part of it: keys are nobody else's.
        secret: what only ranks of this job know; None where they met in a store that strangers can
            reach, too: of several hosts, or of a launcher that hosts it by itself.
    """

    store: Store
    secret: bytes | None = None


def join_store(info: RankInfo, timeout: timedelta | None = None) -> JobStore:
    """Meet the other ranks in the job's store.

    Collective over all ranks of `info`. The call of a model that has no other way to let its ranks
    find each other: each writes where it can be reached, and reads where the others can.

    Args:
        info: who this rank is, as `initialize` of a model gets it.
        timeout: for all ranks to come; None for ours, 60 s.

    Returns:
        The store, and the job's secret where there is one.

    Raises:
        ContextError: there is no address, nobody listens there, or not all ranks came.

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
