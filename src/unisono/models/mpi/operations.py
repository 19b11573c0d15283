"""MPI calls on tensors: buffers, operations, deadlines, and mapping of errors."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from unisono.control.absent_ranks import matching_error, warn_after_s
from unisono.control.signatures import site
from unisono.deadlines import DEFAULT_TIMEOUT_S, format_s, host_s, limit_of
from unisono.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PayloadError,
    PeerFailedError,
)
from unisono.model.fallback import FRAME_BYTES, as_frame, read_frames
from unisono.model.handle import BACKGROUND, SafeFuture
from unisono.model.reduction import TENSOR_STEPS, ReduceOp
from unisono.models.mpi.liveness import LivenessProbe, bounded_barrier
from unisono.topology import named
from unisono.tracebacks import hides

__tracebackhide__ = hides

T = TypeVar("T")

# MPI has no 16-bit floats: they are sent as int16, and reduced by a function of torch.
DATATYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.float16: "INT16_T",
    torch.bfloat16: "INT16_T",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
}
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.AND: "BAND",
    ReduceOp.OR: "BOR",
    ReduceOp.XOR: "BXOR",
}
_log = logging.getLogger(__name__)
# By the names of MPI's error classes. This MPI may lack some of them.
_ERRORS: dict[str, type[CollectiveError]] = {
    "ERR_PROC_FAILED|ERR_PROC_ABORTED|ERR_REVOKED": PeerFailedError,
    "ERR_TRUNCATE": CollectiveMismatchError,
}
_DIFFERENT = ": the ranks passed different sizes, or called different things"
_SPINS_PER_ANSWER = 100  # about 10 ms, once the wait naps after each test
_ASK_S = 0.4  # short: a stuck rank never answers, and the caller is past its deadline
_SPINS = 1_000  # tests of a request before the wait yields to other processes, and then naps
# By number, pending calls of MPI and their memory, from before the call until it is done. Abandoned
# calls stay permanently, even after their context, because MPI may access their memory at any time.
_held: dict[int, list[Any]] = {}
_numbers = itertools.count()


def is_folded_by_torch(dtype: torch.dtype) -> bool:
    """Return whether torch adds and multiplies in place of MPI, which has no 16-bit floats."""
    # Open MPI's vectorised sums of small integers saturate, and torch's wrap around. Open MPI
    # won't change that: https://github.com/open-mpi/ompi/issues/8045
    return dtype.itemsize < torch.float32.itemsize


class MPICalls:
    """MPI calls of one rank."""

    def __init__(self, mpi: Any, rank: int, end_at_exit: Callable[[str], None]) -> None:
        self._mpi = mpi
        self._this_rank = f"rank {rank} of {mpi.COMM_WORLD.size}"
        self._end_at_exit = end_at_exit
        self._operations: dict[tuple[int, torch.dtype], Any] = {}
        self._folds: list[Any] = []  # the operations made here, which `finish` frees
        self._test_lock = threading.Lock()  # two threads must not test one request at once
        self._under_way: dict[int, Any] = {}  # requests by number, as in `_held`
        self._datatypes = {dtype: getattr(mpi, name) for dtype, name in DATATYPES.items()}
        self._memory_at = mpi.buffer.fromaddress
        self._interrupted = ""  # how a call was interrupted, after which this rank is out of step
        self._warn_after_s = warn_after_s()
        self.probe: LivenessProbe = LivenessProbe(mpi, mpi.COMM_WORLD)
        self.timeout_s: float | None = DEFAULT_TIMEOUT_S
        self.timeouts_s: dict[int, float] = {}
        """Timeouts of groups, by the ids of their communicators, which must live as long."""

    def _as_buffer(self, arg: Any) -> Any:
        """Return MPI's buffer of a contiguous tensor, which must outlive it; else `arg` itself."""
        if not isinstance(arg, Tensor):
            return arg
        if arg.is_cuda:
            torch.cuda.current_stream(arg.device).synchronize()  # MPI is unaware of streams
        return [self._memory_at(arg.data_ptr(), arg.nbytes), self._datatypes[arg.dtype]]

    def allows(self, level: str) -> bool:
        """Return whether MPI was initialised with at least the named thread level."""
        return bool(self._mpi.Query_thread() >= getattr(self._mpi, f"THREAD_{level}"))

    def _limit_s(self, comm: Any) -> float | None:
        return limit_of(self.timeouts_s.get(id(comm), self.timeout_s))

    def native_op(self, op: ReduceOp, dtype: torch.dtype) -> Any:
        """Return MPI's operation, or one that calls torch if MPI's has other results."""
        operation = self._operations.get((id(op), dtype))  # an enum's own hash is slow Python
        if operation is None:
            if op.is_bitwise and dtype.is_floating_point:
                raise PayloadError(f"{op.name} works on integer tensors, not on {dtype}")
            if op in (ReduceOp.SUM, ReduceOp.PRODUCT) and is_folded_by_torch(dtype):
                operation = self._mpi.Op.Create(_fold(TENSOR_STEPS[op], dtype), commute=True)
                self._folds.append(operation)
            else:
                operation = getattr(self._mpi, _OPS[op])
            self._operations[id(op), dtype] = operation
        return operation

    def run(self, name: str, comm: Any, *args: Any) -> None:
        """Call a method of a communicator, with tensors as buffers, and wait for it."""
        # Collective over `comm`, except for `Send` and `Recv`.
        try:
            if self._limit_s(comm) is None:  # nothing to poll for: MPI's own wait is faster
                self._check_in_step(name)
                getattr(comm, name)(*map(self._as_buffer, args))
            else:
                number, request = self._begin(getattr(comm, f"I{name.lower()}"), args, name)
                self._await(name, comm, request)
                self._release(number)
        except self._mpi.Exception as error:
            self._fail(name, error)

    def _begin(
        self, start: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> tuple[int, Any]:
        """Start a non-blocking call; return its number in `_held`, and the request."""
        # An interrupt at any moment leaves the memory of the call in `_held`.
        self._check_in_step(name)
        number = next(_numbers)
        buffers = [self._as_buffer(arg) for arg in args]
        entry = _held[number] = [args, buffers]
        self._under_way[number] = request = start(*buffers)
        entry.append(request)
        return number, request

    def _release(self, number: int) -> None:
        self._under_way.pop(number, None)
        _held.pop(number, None)

    def _check_in_step(self, name: str) -> None:
        if self._interrupted:
            raise CollectiveError(
                f"{self._this_rank}: {name}: the ranks are out of step, since {self._interrupted} "
                "here: end the job"
            )

    def mark_interrupted(self, how: str) -> None:
        """Record that a call was interrupted, which the other ranks may complete."""
        self._interrupted = self._interrupted or how
        self._end_at_exit(f"{self._this_rank}: {self._interrupted}")

    def exchange(
        self, comm: Any, n_ranks: int, blob: bytes, largest: int
    ) -> tuple[list[int], list[bytes] | None]:
        """Return the size of every rank's bytes, and the bytes, in one round if all are short."""
        # Collective over `comm`. Returns None for more than `largest` bytes: MPI can't count them.
        byte = self._mpi.BYTE
        heads = bytearray(n_ranks * FRAME_BYTES)
        self.run("Allgather", comm, [as_frame(blob), byte], [heads, byte])
        frames = [bytes(heads[at : at + FRAME_BYTES]) for at in range(0, len(heads), FRAME_BYTES)]
        sizes, blobs = read_frames(frames)
        if blobs is not None or sum(sizes) > largest:
            return sizes, blobs
        bodies = bytearray(sum(sizes))
        self.run("Allgatherv", comm, [blob, byte], [bodies, sizes, byte])
        ends = itertools.accumulate(sizes)
        return sizes, [
            bytes(bodies[end - size : end]) for end, size in zip(ends, sizes, strict=True)
        ]

    def start(
        self, name: str, comm: Any, tensor: Tensor, *args: Any
    ) -> tuple[Callable[[], Tensor], Callable[[], bool]]:
        """Start a non-blocking method with its result in `tensor`. Collective over `comm`."""
        # Calls whose handles were dropped are released here, once they are done.
        for number, earlier in list(self._under_way.items()):
            if self._is_done(earlier):
                self._release(number)
        with self.mapped_errors(name):
            _, request = self._begin(getattr(comm, name), args, name)

        def wait() -> Tensor:
            with self.mapped_errors(name):
                self._await(name, comm, request)
            return tensor

        def is_completed() -> bool:
            with self.mapped_errors(name):
                return self._is_done(request)

        return wait, is_completed

    def _is_done(self, request: Any) -> bool:
        with self._test_lock:
            return bool(request.Test())

    def run_when_all_arrived(
        self, name: str, comm: Any, ranks: Sequence[int], call: Callable[[], T]
    ) -> T:
        """Run a call that MPI can't cancel, once all ranks have arrived in time."""
        # Collective over `ranks`. If MPI may be called from any thread, another thread does both
        # steps: Ctrl-C and alarms interrupt the main thread, and an interrupt between the steps
        # would leave the other ranks in MPI forever.

        def act() -> T:
            with self.mapped_errors(name):
                # Without a limit, MPI's own call waits for the ranks.
                absent = limit_s is not None and bounded_barrier(mpi, comm, ranks, limit_s, name)
                if not absent:
                    return call()
            self.mark_interrupted(f"{name} timed out")
            waited = f"{self._this_rank} waited {format_s(limit_s or 0)}"
            raise CollectiveTimeoutError(f"{named(absent)} never reached {name}: {waited}")

        mpi, limit_s = self._mpi, limit_of(self.timeout_s)
        if not self.allows("MULTIPLE"):
            return act()
        outcome, _ = SafeFuture.in_thread(act, f"{BACKGROUND}-{name}")
        return outcome.wait()

    def finish(self) -> bool:
        """Wait for pending operations, and free the reductions made here.

        Returns False at once after an interrupted call, which may never end.
        """
        if self._interrupted:
            _held[next(_numbers)] = self._folds  # MPI may still call them
            return False
        with self.mapped_errors("finalize"):
            for number, request in list(self._under_way.items()):
                self._await("finalize", self._mpi.COMM_WORLD, request)
                self._release(number)
            for operation in self._folds:
                operation.Free()
        self._folds = []
        return True

    @contextmanager
    def mapped_errors(self, name: str) -> Iterator[None]:
        """Raise unisono's errors in place of MPI's."""
        try:
            yield
        except self._mpi.Exception as error:
            self._fail(name, error)

    def _await(self, name: str, comm: Any, request: Any) -> None:
        """Wait for a call of `_begin`; its memory stays until `_release`."""
        limit_s = self._limit_s(comm)
        if limit_s is None:
            request.Wait()
            return
        begin, doing = time.monotonic(), ""
        deadline, warn_at = begin + host_s(limit_s), begin + host_s(self._warn_after_s)
        for spins in itertools.count():
            if self._is_done(request):
                return
            if time.monotonic() > deadline:
                break
            if spins <= _SPINS:
                continue
            time.sleep(0 if spins < 2 * _SPINS else 1e-4)  # 0 yields the core
            if spins % _SPINS_PER_ANSWER == 0:
                doing = doing or self._describe(name, comm)
                self.probe.answer(doing)
                if time.monotonic() > warn_at:
                    warn_at = math.inf
                    late = self._late(comm, doing)
                    _log.warning("%s still waits in %s: %s", self._this_rank, doing, late)
        # The request is still pending, so that a later call would be out of step.
        self.mark_interrupted(f"{name} timed out")
        doing = doing or self._describe(name, comm)
        late = self._late(comm, doing)
        raise CollectiveTimeoutError(
            f"{late}\n  {self._this_rank} waited {format_s(limit_s)} in {doing}"
        )

    def _ranks(self, comm: Any) -> list[int]:
        return list(comm.group.Translate_ranks(None, self._mpi.COMM_WORLD.group))

    def _describe(self, name: str, comm: Any) -> str:
        return f"{name} over ranks {self._ranks(comm)} at {site().decode('utf-8', 'replace')}"

    def _late(self, comm: Any, doing: str) -> str:
        """Ask all ranks for their calls; return a report of those that don't wait in this one."""
        ranks = self._ranks(comm)
        answers = self.probe.ask(ranks, doing, _ASK_S)
        # Compared without the line of the program, which may differ between ranks in one call.
        me, call = self._mpi.COMM_WORLD.rank, doing.partition(" at ")[0]
        late = [f"rank {rank} never reached {call}" for rank in ranks if rank not in {me, *answers}]
        late += [
            f"rank {rank} waits in {other_call}"
            for rank, other_call in sorted(answers.items())
            if other_call.partition(" at ")[0] != call
        ]
        return (
            "; ".join(late) or f"{call} was not done in time, but all ranks have reached it by now"
        )

    def _fail(self, name: str, error: Any) -> NoReturn:
        number = error.Get_error_class()
        classes = [key for key in dir(self._mpi) if key.startswith("ERR_")]
        names = " ".join(key for key in classes if getattr(self._mpi, key) == number)
        kind = matching_error(_ERRORS, names)
        remedy = _DIFFERENT if kind is CollectiveMismatchError else ""
        raise kind(f"{self._this_rank}: {name} failed: {error}{remedy}") from error


def _fold(step: Callable[..., Tensor], dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """Return a function for ``MPI.Op.Create`` that reduces by a function of torch."""

    def fold(source: Any, target: Any, _datatype: Any) -> None:
        if len(target):  # torch rejects an empty buffer
            into = torch.frombuffer(target, dtype=dtype)
            step(torch.frombuffer(source, dtype=dtype), into, out=into)

    return fold
