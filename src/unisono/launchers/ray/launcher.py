"""Ranks as actors of a Ray cluster, in one placement group."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unisono.deadlines import limit_of, require_time
from unisono.errors import LaunchError, WorkerFailedError
from unisono.launchers.job.failure import PRIMARY_WAIT_S, Failure
from unisono.launchers.job.job import Job, Ranks
from unisono.launchers.job.pickling import pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.ray.actor import RankActor, seats
from unisono.launchers.script.rank.report import Reader, Report
from unisono.launchers.script.script import Script, env_for
from unisono.launchers.script.supervisor import Outcome, show, signals, verdict
from unisono.topology import LaunchPlan, RankInfo

__all__ = ("launch", "run")

_TIMEOUT_S = 60.0  # until the cluster has room
_START_S = 300.0  # until the first actor has begun, which includes importing torch there
_END_S = 3.0  # from the first signal to the end of the actors
_POLL_S = 0.3
_BASE = 128
_OF_RAY = {"PYTHONBREAKPOINT", "RAY_AUTH_MODE", "RAY_CLIENT_MODE"}


@contextlib.contextmanager
def _cluster(n_ranks: int) -> Iterator[None]:
    """Be connected: to the cluster that there is, else to one of this host that ends again."""
    if ray.is_initialized():
        yield
        return
    before = dict(os.environ)
    try:
        try:
            ray.init(address="auto", log_to_driver=True)
        except ConnectionError:
            ray.init(num_cpus=max(n_ranks, os.cpu_count() or 1), include_dashboard=False)
        yield
    finally:
        ray.shutdown()
        for name in _OF_RAY - before.keys():  # Ray sets them in this process
            os.environ.pop(name, None)


@contextlib.contextmanager
def _group(
    bundles: list[dict[str, float]], n_ranks: int, timeout_s: float
) -> Iterator[PlacementGroup]:
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
    try:
        timeout_s = limit_of(timeout_s) or 0.0
        if not group.wait(timeout_s):
            require_time(range(n_ranks), n_ranks, 0.0)
            raise LaunchError(
                f"Ray had no room in {timeout_s:g} s for ranks that need {bundles}, each of these "
                f"on a node of its own; the cluster has {_resources()}: add nodes, or ask for less"
            )
        yield group
    finally:
        remove_placement_group(group)


def _resources() -> list[dict[str, float]]:
    names = ("CPU", "GPU")
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [{name: each[name] for name in names if name in each} for each in alive]


@dataclass(slots=True)
class _Ranks:
    """The actors of a job and who they are."""

    actors: list[Any]
    infos: list[RankInfo]

    def kill(self) -> None:
        """End all actors, and with them what they run. Local."""
        while self.actors:
            ray.kill(self.actors.pop())


@contextlib.contextmanager
def _ranks(counts: Sequence[int], hosts: Sequence[str], timeout_s: float) -> Iterator[_Ranks]:
    """Seat ranks: so many on each node; end them at the end."""
    with _cluster(sum(counts)):
        has_devices = ray.cluster_resources().get("GPU", 0) >= sum(counts)
        each: dict[str, float] = {"CPU": 1.0, "GPU": 1.0} if has_devices else {"CPU": 1.0}
        bundles = [{name: n * amount for name, amount in each.items()} for n in counts]
        for bundle, name in zip(bundles, hosts, strict=False):
            bundle[f"node:{name}"] = 0.001
        with _group(bundles, sum(counts), timeout_s) as group:
            cls: Any = ray.remote(RankActor)
            ranks = _Ranks([], [])
            try:
                for index, n in enumerate(counts):
                    place = PlacementGroupSchedulingStrategy(group, index)
                    options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0)}
                    for _ in range(n):
                        one = cls.options(scheduling_strategy=place, **options)
                        ranks.actors.append(one.remote(len(ranks.actors)))
                ranks.infos = _seat(ranks.actors[0], group, counts)
                yield ranks
            finally:
                ranks.kill()


def _seat(first: Any, group: PlacementGroup, counts: Sequence[int]) -> list[RankInfo]:
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = [table[index] for index, n in enumerate(counts) for _ in range(n)]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    addr = addresses[nodes[0]] if len({addresses[node] for node in nodes}) > 1 else "127.0.0.1"
    try:
        port = ray.get(first.hold_store.remote(addr), timeout=limit_of(_START_S))
    except ray.exceptions.GetTimeoutError as error:
        require_time(range(len(nodes)), len(nodes), 0.0)
        raise LaunchError(f"Ray's actor of rank 0 hasn't begun in {_START_S:g} s") from error
    return seats(nodes, addr, port)


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    counts: Sequence[int] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> list[Any]:
    """Run `entry` in actors of the Ray cluster, or of one that is made on this host.

    Local.

    Args:
        entry: called once in each actor with who it is.
        plan: how many ranks on each of how many nodes.
        environ: variables that the actors have besides their own.
        counts: ranks of each node, where they differ; then the plan's numbers don't count.
        timeout_s: seconds to wait until the cluster has room.

    Returns:
        What `entry` returned, by rank of the whole job.

    Raises:
        PayloadError: `entry` can't be pickled.
        LaunchError: the cluster has no room.
        WorkerFailedError: a rank failed, or its actor died; all others have been ended.
        CollectiveTimeoutError: the block's deadline is over; all actors have been ended.
    """
    pickled = pickle_for_worker(entry)
    shape = tuple(counts) if counts is not None else (plan.nproc_per_node,) * plan.nnodes
    with _ranks(shape, (), timeout_s) as ranks:
        job: Job[Any] = Job(_Calls(ranks, pickled, environ or {}), len(ranks.infos))
        return job.join()


class _Calls(Ranks):
    """One call of a function in every actor; the actors themselves are ended by `_ranks`."""

    def __init__(self, ranks: _Ranks, pickled: bytes, environ: Mapping[str, str]) -> None:
        self._waiting: dict[Any, int] = {}
        path = search_path()  # modules are seen where this process sees them
        for actor, info in zip(ranks.actors, ranks.infos, strict=True):
            variables = {**environ, **env_for(info)}
            who = replace(info, source="spawn")
            self._waiting[actor.call.remote(pickled, who, variables, path)] = info.rank

    def poll(self, job: Job[Any], until: float) -> None:
        """Wait a little for the end of a call, and take it in. Local."""
        left = min(_POLL_S, max(0.0, until - time.monotonic()))
        done, _ = ray.wait(list(self._waiting), timeout=left)
        for ref in done:
            self._take(job, ref, self._waiting.pop(ref))

    def end(self, job: Job[Any]) -> None:
        """Let go of the calls. Local."""
        del job
        self._waiting.clear()

    def _take(self, job: Job[Any], ref: Any, rank: int) -> None:
        try:
            outcome: bytes | Failure = ray.get(ref)
        except ray.exceptions.RayError as error:  # the actor's process, or its node, is gone
            text = f"rank {rank} of {job.world_size} is lost, its actor has died: "
            lost = WorkerFailedError(f"{text}{str(error).strip()}", rank)
            lost.__cause__ = error
            job.fail(rank, lost)
            return
        if isinstance(outcome, Failure):
            job.fail(rank, outcome)
        else:
            job.succeed(rank, outcome)


def run(script: Script) -> Outcome:
    """Run a script in actors of the Ray cluster, or of one that is made on this host.

    Local.

    Args:
        script: what was asked for; hosts are named by the addresses that Ray knows them by.

    Returns:
        How it went.

    Raises:
        LaunchError: the cluster has no room.
    """
    script.refuse("ray", "Ray finds it out", "node_rank", "master_addr", "master_port")
    script.refuse("ray", "use launcher 'torchrun'", "max_restarts")
    hosts = [name for name, _ in script.hosts]
    counts = [n for _, n in script.hosts] or [script.nproc_per_node] * script.nnodes
    own = {name: os.environ[name] for name in ("UNISONO_BACKEND",) if name in os.environ}
    with signals() as seen:
        try:
            with _ranks(counts, hosts, script.timeout_s or _TIMEOUT_S) as ranks:
                for info in ranks.infos:
                    variables = {**own, **env_for(info)}
                    ranks.actors[info.rank].start.remote(script, variables, os.getcwd())
                outcome = _Programs(ranks, Reader(script.token), seen).outcome()
        except BaseException:  # Ray may make anything of the exception that a signal raises
            if not seen:
                raise
    return Outcome(_BASE + seen[0], interrupted=seen[0]) if seen else outcome


@dataclass(slots=True)
class _Programs:
    """One program in every rank."""

    ranks: _Ranks
    reader: Reader
    seen: list[int]
    _reports: list[Report] = field(default_factory=list)
    _codes: dict[int, int] = field(default_factory=dict)
    _rests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    _is_ending: bool = False

    def outcome(self) -> Outcome:
        """Print what they print until all have ended; end all if one fails."""
        polls = {actor.poll.remote(): rank for rank, actor in enumerate(self.ranks.actors)}
        deadline = float("inf")
        while polls and not self.seen and time.monotonic() < deadline + _END_S:
            done, _ = ray.wait(list(polls), timeout=_POLL_S)
            for ref in done:
                rank = polls.pop(ref)
                if self._take(ref, rank):
                    polls[self.ranks.actors[rank].poll.remote()] = rank
            if self._reports or any(self._codes.values()):
                deadline = min(deadline, time.monotonic() + PRIMARY_WAIT_S)
            if time.monotonic() >= deadline and not self._is_ending:
                self._is_ending = True
                for rank in polls.values():
                    self.ranks.actors[rank].stop.remote()
        found = verdict(self._reports)
        if found.failed is not None:
            return found
        return replace(found, code=next((code for code in self._codes.values() if code), 0))

    def _note(self, report: Report) -> None:
        """Take a failure in, unless only the rank's end was asked for."""
        if not self._is_ending or report.was_told:
            self._reports.append(report)

    def _take(self, ref: Any, rank: int) -> bool:
        """Take in what one rank has to say, and tell whether it goes on."""
        try:
            chunks, code = ray.get(ref)
        except ray.exceptions.RayError as error:
            n_ranks, words = len(self.ranks.infos), f"its actor has died: {error}"
            self._note(Report(rank, n_ranks, "unknown", -1, 1, words=words))
            self._codes[rank] = 1
            return False
        for target, chunk in chunks:
            lines = (self._rests.pop((rank, target), b"") + chunk).splitlines(keepends=True)
            if lines and not lines[-1].endswith((b"\n", b"\r")):
                self._rests[rank, target] = lines.pop()
            for line in lines:
                said = self.reader.read(line)
                if isinstance(said, Report):
                    self._note(said)
                elif not said:
                    show(target, line)
        if code is not None:
            self._codes[rank] = code if code >= 0 else _BASE - code
        return code is None
