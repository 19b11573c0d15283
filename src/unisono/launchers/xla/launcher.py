"""Replicas that torch_xla's own launcher makes, in a fresh process that this one starts.

The runtime reads its variables once, when it starts, and torch_xla sets some itself when it is
imported; so neither happens here. The fresh process forks the one, or on a TPU the several, in
which the replicas run, as threads where there are more of them than processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from unisono.deadlines import limit_of
from unisono.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    LaunchError,
    WorkerFailedError,
)
from unisono.launchers.job.failure import signal_name
from unisono.launchers.job.job import Job
from unisono.launchers.job.wrapper import boot
from unisono.launchers.script.remote_workers import (
    ConnectedRank,
    LauncherSpec,
    RemoteWorkers,
    run_function,
)
from unisono.launchers.script.script import Script
from unisono.launchers.variables import OF_XLA, without
from unisono.launchers.xla.child import FORK_DIED
from unisono.topology import LaunchPlan, RankInfo

_SERVE = "from unisono.launchers.xla.child import serve; serve({})"


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str],
    join: bool = True,
) -> Any:
    """Run `entry` in the replicas that XLA's runtime makes."""
    if plan.start_method not in (None, "fork"):
        raise ArgumentError(
            f"start_method={plan.start_method!r}: XLA's replicas are forked from a fresh process, "
            "so leave it out"
        )

    def prepare(*_: Any) -> tuple[Sequence[str], Mapping[str, str]]:
        command = boot(_SERVE.format(plan.nproc_per_node == 1))
        return command, {**without(os.environ, OF_XLA), **environ}

    size = 1 if plan.nproc_per_node == 1 else plan.nproc_per_node * plan.nnodes
    spec = LauncherSpec(
        "XLA's runtime",
        size,
        plan.nproc_per_node,
        end_signal=signal.SIGKILL,  # it ignores SIGTERM, so that those that it forks end first
    )
    ranks = partial(_Replicas, plan)
    return run_function(entry, Script.of(plan), spec, prepare, environ, ranks, join=join)


class _Replicas(RemoteWorkers):
    """Replicas of one fresh process; each has connections of its own."""

    takes: Sequence[int] = ()
    n_last = 200

    def __init__(self, plan: LaunchPlan, *args: Any) -> None:
        super().__init__(*args)
        self._plan = plan

    def see_out(self, job: Job[Any]) -> None:
        """Wait for the process's end: what it still does may be a checkpoint."""
        assert self.process is not None
        if not self.has_ended(limit_of(None)):
            raise CollectiveTimeoutError(
                "the block's deadline is over: XLA's replicas have returned, but their process "
                "still had threads or exit handlers"
            )
        if self.process.returncode != 0:
            job.stop(self.early_end(job))

    def end(self, job: Job[Any]) -> None:
        """End the fresh process and those that it forked, and their connections with them."""
        self.end_launcher()
        super().end(job)

    def doubt(self, rank: int) -> int:
        """Doubt that a replica ended its process."""
        del rank
        return 1

    def lost(self, job: Job[Any], rank: int) -> LaunchError:
        """Return the error of the process of a replica."""
        del rank
        self.end_launcher()
        return self.early_end(job)

    def early_end(self, job: Job[Any]) -> WorkerFailedError:
        """Return the error of the process, with its threads' stacks if it printed them."""
        del job
        assert self.process is not None
        code = self.process.returncode
        name = signal_name(-code) if code < 0 else None
        how = f" by {name}" if name else f" with exit code {code}" if code != FORK_DIED else ""
        return WorkerFailedError(
            f"the process of XLA's replicas ended{how} before they were done; its last words:\n"
            f"{self.last_lines()}",
            exit_code=code if code >= 0 and code != FORK_DIED else None,
            signal=name,
        )

    def problem_with(self, who: RankInfo | str | None) -> str:
        """Say why a replica isn't one of this job."""
        asked = self._plan.nproc_per_node
        if isinstance(who, RankInfo) and who.local_world_size != asked:
            n_local = who.local_world_size
            return (
                f"nproc_per_node={asked}, but XLA's runtime has {n_local} devices on this node: "
                f"ask for {n_local}, or for 1"
            )
        return super().problem_with(who)

    def seat(self, job: Job[Any], arrival: ConnectedRank) -> None:
        """Add a replica to the workers, with its node."""
        assert isinstance(arrival.who, RankInfo)
        who = replace(arrival.who, node_rank=self._plan.node_rank, nnodes=self._plan.nnodes)
        super().seat(job, replace(arrival, who=who))
