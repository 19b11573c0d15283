"""Ranks as actors of a Ray cluster, in one placement group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unisono.control.addresses import LOOPBACK, why_unreachable
from unisono.deadlines import limit_of, require_time
from unisono.errors import ArgumentError, LaunchError
from unisono.launchers.job.failure import Failure, exit_code_of
from unisono.launchers.job.job import Job, JobRanks
from unisono.launchers.job.output import Pipes
from unisono.launchers.job.pickling import load_from_parent, pickle_for_worker
from unisono.launchers.job.process_state import search_path
from unisono.launchers.job.signals import END_S, SignalledError, signals
from unisono.launchers.job.store import hold
from unisono.launchers.job.worker import describe
from unisono.launchers.script.rank.report import Report
from unisono.launchers.script.script import Script, env_for, rank_infos
from unisono.launchers.script.supervisor import Programs, ScriptOutcome, outcome
from unisono.launchers.variables import run_variables
from unisono.pickling import dumps
from unisono.topology import LaunchPlan, RankInfo

_TIMEOUT_S = 60.0  # until the cluster has room
_START_S = 300.0  # until the first actor has begun, which includes importing torch there
_ANSWER_S = 5.0  # until the cluster of RAY_ADDRESS accepts a connection
_END_S = 3.0  # from the first signal to the end of the actors
_POLL_S = 0.3
# Variables that Ray sets in this process.
_OF_RAY = {"PYTHONBREAKPOINT", "RAY_AUTH_MODE", "RAY_CLIENT_MODE"}


class RankActor:
    """An actor that is one rank: it runs a function, or a program whose output it returns."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._held = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def hold_store(self, addr: str) -> int | None:
        """Host the rendezvous at this node's address; return its port."""
        return hold(LaunchPlan(1, master_addr=addr), self._held).master_port

    def call(
        self,
        pickled: bytes,
        info: RankInfo,
        environ: Mapping[str, str],
        facts: Mapping[str, str],
        path: Sequence[str],
    ) -> Any:
        """Run a function as rank `info`; return its pickled result, or a `Failure`."""
        # After a failure this process stays, so that its connections are open until the launching
        # process has the failure. A node's variables override `environ`, but not the `facts`.
        os.environ.update({**environ, **os.environ, **facts})
        sys.path.extend(item for item in path if item not in sys.path)
        try:
            entry: Callable[[RankInfo], Any] = load_from_parent(pickled)
            return dumps(entry(info))
        except BaseException as error:  # SystemExit and KeyboardInterrupt are failures too
            failure: Failure = describe(error)
            return failure

    def start(self, script: Script, environ: Mapping[str, str], directory: str) -> None:
        """Start a program."""
        cwd = directory if os.path.isdir(directory) else None
        self._pipes = Pipes()
        variables = {**os.environ, **environ}
        self._process = self._pipes.start(script.rank_argv(os.getpid()), variables, cwd=cwd)

    def poll(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """Wait briefly for lines; return them, and the exit code once the program has ended."""
        assert self._process is not None
        lines = self._pipes.read(_POLL_S)
        return lines, None if self._pipes.open else self._process.wait()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the program."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.send_signal(number)


@contextlib.contextmanager
def _cluster(n_ranks: int) -> Iterator[None]:
    """Connect to the cluster that the user names, otherwise to a temporary one on this host."""
    if ray.is_initialized():
        yield
        return
    before = {name: os.environ[name] for name in _OF_RAY & os.environ.keys()}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _connect(n_ranks)
        if handler is not signal.SIG_DFL:  # SIG_DFL would keep Ray from ending its processes
            _restore_sigterm(handler)
        yield
    finally:
        ray.shutdown()
        _restore_sigterm(handler)
        for name in _OF_RAY:
            os.environ.pop(name, None)
        os.environ.update(before)


def _connect(n_ranks: int) -> None:
    """Connect to the cluster of ``RAY_ADDRESS`` or ``ray start``; if none is named, start one."""
    # Never ``address="auto"``, which joins any Ray on this host, even another job's temporary one:
    # when that one ends, Ray ends this process with it.
    address = os.environ.get("RAY_ADDRESS", "")
    named = f"RAY_ADDRESS={address}" if address else "the address that `ray start` has recorded"
    try:
        _require_answer(address)
        if "://" in address:  # an address of Ray's client, which accepts no num_cpus
            ray.init()
            return
        try:
            # Ray's CPUs are only a count: there may be more ranks than cores.
            ray.init(num_cpus=max(n_ranks, os.cpu_count() or 1), include_dashboard=False)
        except ValueError:  # the user names a cluster, which has its own CPUs
            ray.init()
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"no Ray cluster can be joined at {named}: {error}. Correct the address, start that "
            "cluster, or set RAY_ADDRESS=local for a cluster of this job alone"
        ) from error


def _require_answer(address: str) -> None:
    """Raise OSError if HOST:PORT accepts no connection; Ray itself would try for minutes."""
    name, separator, port = address.rpartition(":")
    if separator and "/" not in name and port.isdigit():
        reason = why_unreachable(name.strip("[]"), int(port), _ANSWER_S)
        if reason is not None:
            raise reason


def _restore_sigterm(handler: Any) -> None:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _group(
    bundles: list[dict[str, float]], n_ranks: int, timeout_s: float
) -> Iterator[PlacementGroup]:
    """Reserve a bundle of resources on each node, until the block ends."""
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
    try:
        timeout_s = limit_of(timeout_s) or 0.0  # never None, as `timeout_s` isn't
        if not group.wait(timeout_s):
            require_time(range(n_ranks), n_ranks)  # raises if the block's deadline is over
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


@contextlib.contextmanager
def _actors(
    counts: Sequence[int], hosts: Sequence[str], timeout_s: float
) -> Iterator[tuple[list[Any], list[RankInfo]]]:
    """Start actors, `counts` of them on the nodes; yield them and their infos, then end them."""
    with _cluster(sum(counts)):
        # Either every rank gets a device or none does.
        has_devices = ray.cluster_resources().get("GPU", 0) >= sum(counts)
        per_rank: dict[str, float] = {"CPU": 1.0, "GPU": 1.0} if has_devices else {"CPU": 1.0}
        bundles = [{name: n * amount for name, amount in per_rank.items()} for n in counts]
        for bundle, name in zip(bundles, hosts, strict=False):  # no hosts: Ray chooses the nodes
            bundle[f"node:{name}"] = 0.001  # each node has 1 unit of a resource with its name
        with _group(bundles, sum(counts), timeout_s) as group:
            cls: Any = ray.remote(RankActor)
            actors: list[Any] = []
            try:
                for index, n in enumerate(counts):
                    strategy = PlacementGroupSchedulingStrategy(group, index)
                    options = {"num_cpus": per_rank["CPU"], "num_gpus": per_rank.get("GPU", 0)}
                    for _ in range(n):
                        placed = cls.options(scheduling_strategy=strategy, **options)
                        actors.append(placed.remote(len(actors)))
                yield actors, _infos_of(actors[0], group, counts)
            finally:
                for actor in actors:
                    ray.kill(actor)


def _infos_of(first: Any, group: PlacementGroup, counts: Sequence[int]) -> list[RankInfo]:
    """Return the ranks' infos; the first actor hosts their rendezvous."""
    table = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    hosts = [addresses[table[index]] for index in range(len(counts))]  # one bundle for each node
    addr = hosts[0] if len(set(hosts)) > 1 else LOOPBACK
    try:
        port = ray.get(first.hold_store.remote(addr), timeout=limit_of(_START_S))
    except ray.exceptions.GetTimeoutError as error:
        require_time(range(sum(counts)), sum(counts))
        raise LaunchError(f"Ray's actor of rank 0 hasn't begun in {_START_S:g} s") from error
    return rank_infos(counts, addr, port)


def launch(
    entry: Callable[[RankInfo], Any],
    plan: LaunchPlan,
    *,
    environ: Mapping[str, str] | None = None,
    counts: Sequence[int] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> list[Any]:
    """Run `entry` in actors of the user's Ray cluster, otherwise of one started on this host."""
    # The user's cluster is that of ``RAY_ADDRESS``, or of ``ray start`` on this host.
    pickled = pickle_for_worker(entry)
    shape = (plan.nproc_per_node,) * plan.nnodes if counts is None else tuple(counts)
    if len(shape) != plan.nnodes:  # with nnodes=1, ranks would listen on the loopback alone
        raise ArgumentError(
            f"counts={counts!r} has {len(shape)} nodes: pass nnodes={len(shape)}, too"
        )
    with _actors(shape, (), timeout_s) as (actors, infos):
        job: Job[Any] = Job(_ActorCalls(actors, infos, pickled, environ or {}), len(infos))
        return job.join()


class _ActorCalls(JobRanks):
    """One call of a function in every actor; `_actors` ends the actors themselves."""

    def __init__(
        self,
        actors: Sequence[Any],
        infos: Sequence[RankInfo],
        pickled: bytes,
        environ: Mapping[str, str],
    ) -> None:
        self._waiting: dict[Any, int] = {}
        path = search_path()  # modules are searched where this process searches them
        for actor, info in zip(actors, infos, strict=True):
            who = replace(info, source="spawn")
            variables = (environ, env_for(info))
            self._waiting[actor.call.remote(pickled, who, *variables, path)] = info.rank

    def poll(self, job: Job[Any], until: float) -> None:
        left = min(_POLL_S, max(0.0, until - time.monotonic()))
        done, _ = ray.wait(list(self._waiting), timeout=left)
        for ref in done:
            self._record(job, ref, self._waiting.pop(ref))

    def end(self, job: Job[Any]) -> None:
        self._waiting.clear()  # nothing waits for the calls: `_actors` kills the actors

    def _record(self, job: Job[Any], ref: Any, rank: int) -> None:
        try:
            job.record(rank, ray.get(ref))
        except ray.exceptions.RayError as error:  # the actor's process, or its node, is gone
            job.lose(rank, f"its actor has died: {str(error).strip()}", error)


def run(script: Script) -> ScriptOutcome:
    """Run a script in actors of the user's Ray cluster, otherwise of one started on this host."""
    # The user's cluster is that of ``RAY_ADDRESS``, or of ``ray start`` on this host.
    script.refuse("ray", "Ray decides on it", "node_rank", "master_addr", "master_port")
    script.refuse("ray", "use launcher 'torchrun'", "max_restarts")
    hosts = [name for name, _ in script.hosts]
    counts = [n for _, n in script.hosts] or [script.nproc_per_node] * script.nnodes
    with signals() as seen:
        try:
            with _actors(counts, hosts, script.timeout_s or _TIMEOUT_S) as (actors, infos):
                for actor, info in zip(actors, infos, strict=True):
                    variables = {**run_variables(os.environ), **env_for(info)}
                    actor.start.remote(script, variables, os.getcwd())
                found = _Programs(actors, script.token, seen).run(script.grace_s)
        except BaseException:  # Ray may convert the exception that a signal raises into any other
            if not seen:
                raise
    return ScriptOutcome(exit_code_of(-seen[0]), interrupted=seen[0]) if seen else found


class _Programs(Programs):
    """The programs of all ranks, one in each actor."""

    def __init__(self, actors: Sequence[Any], token: str, seen: Sequence[int]) -> None:
        super().__init__(token)
        self._actors = actors
        self._seen = seen
        self._polls = {actor.poll.remote(): rank for rank, actor in enumerate(self._actors)}
        self._codes: dict[int, int] = {}
        self._is_ending = False

    def run(self, grace_s: float) -> ScriptOutcome:
        """Print the programs' output until all have ended; end all if one fails."""
        job: Job[None] = Job(self, len(self._actors), grace_s=grace_s + END_S)
        with contextlib.suppress(LaunchError):
            job.finish()
        return outcome(job, self.reports, self._codes.values())

    def signal(self, number: int) -> None:
        """Send a signal to all programs; SIGINT for SIGKILL, since wrappers then kill them."""
        number = signal.SIGINT if number == signal.SIGKILL else number
        for actor in self._actors:
            actor.stop.remote(number)

    def note(self, job: Job[Any], report: Report) -> None:
        if not self._is_ending:  # all ranks fail while the job ends
            super().note(job, report)

    def poll(self, job: Job[Any], until: float) -> None:
        if self._seen:  # Ray may have swallowed the exception
            raise SignalledError(self._seen[0])
        if not self._polls:  # a rank has failed, as otherwise the job would be over
            job.stop(LaunchError("all programs of the job have ended"))
            return
        left_s = max(0.0, min(_POLL_S, until - time.monotonic()))
        done, _ = ray.wait(list(self._polls), timeout=left_s)
        for ref in done:
            self._record(job, ref, self._polls.pop(ref))

    def end(self, job: Job[Any]) -> None:
        """Stop the remaining programs, and wait for their end."""
        self._is_ending = True
        if self._seen:  # `poll` would raise again; `_actors` ends the actors with their programs
            return
        # SIGTERM lets programs end by themselves; ranks that had a signal have had that time.
        self.signal(signal.SIGINT if job.orders.received else signal.SIGTERM)
        limit = time.monotonic() + _END_S
        while self._polls and time.monotonic() < limit:
            self.poll(job, limit)

    def _record(self, job: Job[Any], ref: Any, rank: int) -> None:
        try:
            lines, code = ray.get(ref)
        except ray.exceptions.RayError as error:
            output = f"its actor has died: {error}"
            self.note(job, Report(rank, job.world_size, "unknown", -1, 1, words=output))
            self._codes[rank] = 1
            return
        self.pass_on(job, lines)
        if code is None:
            self._polls[self._actors[rank].poll.remote()] = rank
        elif code == 0:
            job.succeed(rank, b"")  # a script has no result
        else:
            self._codes[rank] = exit_code_of(code)
            job.fail(rank, None)
