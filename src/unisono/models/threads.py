"""Reference model: replicas as threads of one process, without network or processes."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unisono.arguments import only_timeout_s
from unisono.control.absent_ranks import Missing, report, stack_of, warn_after_s
from unisono.control.plane import ControlPlane
from unisono.deadlines import DEFAULT_TIMEOUT_S, allowed_s, end_of_block, format_s, overdue
from unisono.errors import CollectiveTimeoutError, PeerFailedError, WorkerFailedError
from unisono.model.contract import COMMON_DTYPES, ComputationModel
from unisono.model.launching import LaunchHooks
from unisono.model.reduction import ReduceOp, fold_tensors
from unisono.models.thread_exchange import ThreadExchange
from unisono.topology import ContextHint, Group, LaunchPlan, RankInfo, Topology, name_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_GRACE_S = 2.0  # time for replicas to notice a failure
_POLL_S = 0.2  # each `join` is short, because a failure doesn't wake it
_REPORT_S = 0.3  # after a deadline, for errors of the replicas that wait, which say more
_log = logging.getLogger(__name__)


class _World(ThreadExchange):
    """Shared state of the replicas of one job: rounds, messages and the first failure."""

    failure: tuple[int, str] | None

    def __init__(self, size: int, timeout_s: float | None) -> None:
        super().__init__(warn_after_s())
        self.size = size
        self.timeout_s: float = timeout_s or DEFAULT_TIMEOUT_S
        self.is_lost: bool = False  # whether a replica has failed, so that the others soon will
        self.is_late: bool = False  # whether that failure is a timeout
        self.threads: dict[int, int] = {}  # the replicas' thread ids, by rank
        # By the name of the group, the sender and the receiver.
        self._messages: dict[tuple[str, int, int], list[Tensor]] = {}

    def fail(self, rank: int, text: str) -> None:
        """Mark the job as failed by `rank`; waiting replicas raise."""
        with self._condition.lock:
            self.is_lost = True
            if self.failure is None:  # later failures mostly follow from the first
                self.failure = (rank, text)
            self._condition.notify_all()

    def join_threads(self, threads: list[threading.Thread]) -> None:
        """Wait for the replicas; after a failure only for a grace period."""
        # A thread can't be killed: one that keeps computing is left behind as a daemon.
        deadline, late = end_of_block(), ""
        end = math.inf if deadline is None else deadline + _REPORT_S
        for thread in threads:
            while thread.is_alive() and not self.is_lost:
                thread.join(min(_POLL_S, _left(end)))
                if not _left(end):
                    ranks = [rank for rank in range(self.size) if not self.has_left(rank)]
                    late = f"{overdue(ranks, self.size)}\n{self._describe(ranks)}"
                    # Replicas that wait in a collective raise now, and so end in time.
                    self.fail(-1, "the deadline is over")  # -1: no replica failed
        end = time.monotonic() + _GRACE_S
        for thread in threads:
            thread.join(_left(end))
        computing = [thread.name for thread in threads if thread.is_alive()]
        if computing:
            why = "the deadline" if late else "another one failed"
            _log.warning("replicas still computing after %s: %s", why, ", ".join(computing))
        if late:
            raise CollectiveTimeoutError(late)

    def post(self, key: tuple[str, int, int], tensor: Tensor) -> None:
        """Post a message; never waits."""
        with self._condition.lock:
            self._messages.setdefault(key, []).append(tensor)
            self._condition.notify_all()

    def fetch(self, key: tuple[str, int, int], rank: int, timeout_s: float | None) -> Tensor:
        """Receive the oldest message of `key`."""
        messages, src = self._messages, key[1]
        missing = lambda: [] if messages.get(key) else [src]  # noqa: E731
        # Without entries, as a message belongs to no round.
        self._wait(missing, {}, rank, f"recv from rank {src}", timeout_s)
        with self._condition.lock:
            message = messages[key].pop(0)
            if not messages[key]:
                del messages[key]
        return message

    def _check(self, rank: int, doing: str) -> None:
        if self.failure is None:
            return
        peer, text = self.failure
        if self.is_late:
            raise CollectiveTimeoutError(f"{text}\n  rank {rank} {doing}")
        raise PeerFailedError(f"rank {rank} {doing}, but rank {peer} failed: {text}", peer, text)

    def _time_out(
        self, rank: int, late: list[int], call: str, limit_s: float
    ) -> CollectiveTimeoutError:
        """Fail the rounds of all ranks with one error text."""
        text = f"{self._describe(late, call)}\n  rank {rank} waited {format_s(limit_s)} in {call}"
        self.failure, self.is_late = (late[0], text), True
        self._condition.notify_all()
        return CollectiveTimeoutError(text)

    def _warn(self, rank: int, late: list[int], call: str) -> None:
        _log.warning("rank %d still waits in %s: %s", rank, call, self._describe(late))

    def _describe(self, ranks: list[int], call: str = "") -> str:
        stacks = {r: stack_of(self.threads[r]) for r in ranks if r in self.threads}
        missing = [Missing(r, stack=stacks.get(r, "")) for r in ranks]
        # The table of waiting ranks is empty, as each of them adds a line to its own error.
        return report(call.partition(" at ")[0], {}, missing)


class _ControlPlane(ControlPlane):
    def __init__(self, model: ThreadsModel, world: _World) -> None:
        super().__init__(model)
        self._world = world

    def interrupt(self, how: str) -> None:
        self._world.fail(self.model.topology.rank, how)


class ThreadsModel(ComputationModel, LaunchHooks):
    """Replica of a job whose replicas are threads of this process."""

    name: ClassVar[str] = "threads"
    backends: ClassVar[tuple[str, ...]] = ("threads",)
    capabilities: ClassVar[frozenset[str]] = frozenset({"groups", "send_recv", "launch"})
    replicas_are_threads: ClassVar[bool] = True
    dtypes: frozenset[torch.dtype] = COMMON_DTYPES
    topology: Topology = Topology(0, 1)

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self.topology = Topology(rank, world.size, rank, world.size, 0, 1)
        self._groups_made: dict[tuple[int, ...], int] = {}  # how many of the same ranks
        self.control: ControlPlane = _ControlPlane(self, world)

    @classmethod
    def from_context(cls, hint: ContextHint) -> Self | None:
        return None

    @classmethod
    def initialize(cls, backend: str, info: RankInfo, **options: Any) -> Self:
        return cls(_World(1, only_timeout_s(backend, options)), 0)

    def finalize(self) -> None:
        return

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def abort(self) -> None:
        self._world.fail(self.topology.rank, "it left the job")

    @classmethod
    def launch(cls, entry: Callable[[Self], T], plan: LaunchPlan, **options: Any) -> list[T]:
        world = _World(plan.nproc_per_node, only_timeout_s("threads", options))
        results: dict[int, T] = {}
        failures: list[tuple[int, BaseException]] = []

        def run(rank: int) -> None:
            world.threads[rank] = threading.get_ident()
            try:
                # Autograd's own threads would run hooks outside of the replica's thread.
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = entry(cls(world, rank))
                world.leave(rank, "ended before reaching the call")
            except BaseException as error:  # also SystemExit: a replica that exits has failed
                failures.append((rank, error))  # before the description, which takes a while
                text = str(WorkerFailedError.of(error, rank, world.size))
                world.fail(rank, text.splitlines()[0])

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"unisono-rank-{rank}", daemon=True)
            for rank in range(world.size)
        ]
        try:
            for thread in threads:
                thread.start()
            world.join_threads(threads)
        except BaseException:  # Ctrl-C: replicas that wait in a collective must stop
            world.fail(-1, "the parent was interrupted")
            raise
        if failures:
            rank, first = failures[0]
            raise WorkerFailedError.of(first, rank, world.size)
        # These still compute: another rank has left the job, by `abort` or an interrupt.
        missing = [rank for rank in range(world.size) if rank not in results]
        if missing:
            raise WorkerFailedError(f"ranks {missing} of {world.size} left the job", missing[0])
        return [results[rank] for rank in range(world.size)]

    def _swap(self, call: str, item: T, group: Group | None) -> list[T]:
        ranks, rank = self.topology.members(group), self.topology.rank
        timeout_s = allowed_s(self._world.timeout_s, group)
        return self._world.swap(name_of(group), ranks, rank, call, item, timeout_s)

    # Other replicas may read a submitted tensor after its rank's call has returned, when the caller
    # may already overwrite that tensor. Therefore each rank submits a clone.

    def _swap_tensors(self, call: str, tensor: Tensor, group: Group | None) -> list[Tensor]:
        return self._swap(f"{call} {tensor.dtype} {list(tensor.shape)}", tensor, group)

    def exchange(self, blob: bytes, group: Group | None = None) -> list[bytes]:
        return self._swap("an exchange of values", blob, group)

    def all_gather(self, tensor: Tensor, group: Group | None = None) -> Tensor:
        return torch.stack(self._swap_tensors("all_gather", tensor.clone(), group))

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group | None = None) -> Tensor:
        parts = self._swap_tensors(f"all_reduce {op.name}", tensor.clone(), group)
        return fold_tensors(op, parts)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None = None) -> Tensor:
        # Only the source's part is read, so the other ranks needn't clone theirs.
        part = tensor.clone() if src == self.topology.rank else tensor
        parts = self._swap_tensors(f"broadcast from {src}", part, group)
        return parts[self.topology.position(group, src)].clone()  # all ranks have got one tensor

    def all_to_all(self, rows: Tensor, group: Group | None = None) -> Tensor:
        parts = self._swap_tensors("all_to_all", rows.clone(), group)
        return torch.stack([part[self.topology.position(group)] for part in parts])

    def send(self, tensor: Tensor, dst: int, group: Group | None = None) -> None:
        self._world.post((name_of(group), self.topology.rank, dst), tensor.clone())

    def recv(self, into: Tensor, src: int, group: Group | None = None) -> Tensor:
        rank = self.topology.rank
        return self._world.fetch(
            (name_of(group), src, rank), rank, allowed_s(self._world.timeout_s, group)
        )

    def new_group(self, ranks: tuple[int, ...], **options: Any) -> Group:
        timeout_s = only_timeout_s("new_group on threads", options)
        # The count gives each group of the same ranks its own rounds and messages.
        count = self._groups_made[ranks] = self._groups_made.get(ranks, 0) + 1
        return Group(ranks, name=f"{ranks} {count}", timeout_s=timeout_s)


def _left(end: float) -> float:
    """Return the seconds until `end`; 0 afterwards, as `Thread.join` takes no negative ones."""
    return max(0.0, end - time.monotonic())
