"""Ranks on the workers of a Dask cluster: one that runs already, or one of this host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dask
import distributed
from distributed import Client, LocalCluster, Security

from unisono import LaunchPlan, RankInfo
from unisono.deadlines import limit_of, require_time
from unisono.errors import ArgumentError, LaunchError
from unisono.launching import host_job

__all__ = ("launch",)

_START_S = 120.0
_LOOK_S = 0.1
# A rank that is lost isn't run again: the others have gone on without it.
_SETTINGS = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.worker.memory.terminate": False,
    "distributed.admin.log-format": "%(message)s",
}


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    scheduler: str | None = None,
    address: str | None = None,
) -> list[Any]:
    """Run `entry` in tasks of a Dask cluster, each on a worker of its own.

    Args:
        entry: called once in each rank with who it is.
        plan: how many ranks; of one node.
        environ: variables that ranks have unless they are set there already.
        scheduler: address of the cluster's scheduler; None for a cluster of this host, which
            nobody else can use. Over ``tcp://`` all that is sent there goes in the clear.
        address: address of this host under which the cluster's workers reach it; None where they
            are on this host.
    """
    if plan.nnodes > 1:
        raise ArgumentError("launcher 'dask' seats ranks on any workers: leave nnodes out")
    with (
        host_job(entry, plan, environ=environ, address=address) as job,
        _cluster(plan.world_size, scheduler) as client,
    ):
        workers = list(client.scheduler_info(n_workers=-1)["workers"])
        if len(workers) < plan.world_size:
            raise LaunchError(f"{plan.world_size} ranks need as many workers, not {len(workers)}")
        places = zip(job.tasks, workers, strict=False)
        return job.results(
            [
                client.submit(task, workers=[worker], pure=False, retries=0)
                for task, worker in places
            ]
        )


@contextlib.contextmanager
def _cluster(n_workers: int, scheduler: str | None) -> Iterator[Client]:
    """Be connected to a cluster; to one of this host that ends with the block, if to none."""
    with contextlib.ExitStack() as held:
        if scheduler is None:
            held.enter_context(_variables_kept())
            held.enter_context(dask.config.set(_SETTINGS))
            made = LocalCluster(
                n_workers=n_workers,
                security=Security.temporary(),  # else each user of this host can run code in it
                threads_per_worker=1,
                dashboard_address=None,
                silence_logs="CRITICAL",
            )
            scheduler = held.enter_context(made)
        client = held.enter_context(Client(scheduler, set_as_default=False))
        limit_s = max(limit_of(_START_S) or 0.0, _LOOK_S)  # Dask takes 0 for no limit
        try:
            client.wait_for_workers(n_workers, timeout=limit_s)
        except distributed.TimeoutError as error:
            require_time(range(n_workers), n_workers)
            said = f"{n_workers} ranks need as many workers, and not all came in {limit_s:.0f} s"
            raise LaunchError(said) from error
        yield client


@contextlib.contextmanager
def _variables_kept() -> Iterator[None]:
    """Take back the variables that Dask sets in this process for its workers."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
