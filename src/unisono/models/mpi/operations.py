"""MPI calls on tensors: buffers, operations, deadlines, and mapping of errors."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from unisono.control.absent_ranks import LOOK_S, Wait, matching_error
from unisono.control.plane import SocketControlPlane
from unisono.deadlines import allowed_s, limit_of
from unisono.errors import (
    CollectiveError,
    CollectiveMismatchError,
    PayloadError,
    PeerFailedError,
)
from unisono.model.handle import Handle
from unisono.model.reduction import TENSOR_STEPS, ReduceOp
from unisono.topology import Group, name_of

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
# By the names of MPI's error classes. This MPI may lack some of them.
_ERRORS: dict[str, type[CollectiveError]] = {
    "ERR_PROC_FAILED|ERR_PROC_ABORTED|ERR_REVOKED": PeerFailedError,
    "ERR_TRUNCATE": CollectiveMismatchError,
}
_DIFFERENT = ": the ranks passed different sizes, or called different things"
_SPINS = 1_000  # tests of a request before the wait yields to other processes, and then naps
_Started = tuple[str, "Group | None", int, Any]
"""The arguments of `MPICalls._await`: a call's name, group, number in the group, and request."""
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

    def __init__(
        self, mpi: Any, control: SocketControlPlane, end_at_exit: Callable[[str], None]
    ) -> None:
        self._mpi = mpi
        self._control = control
        self._end_at_exit = end_at_exit
        self._operations: dict[tuple[int, torch.dtype], Any] = {}
        self._folds: list[Any] = []  # the operations made here, which `finish` frees
        self._test_lock = threading.Lock()  # two threads must not test one request at once
        self._under_way: dict[int, _Started] = {}  # by number, as in `_held`
        self._datatypes = {dtype: getattr(mpi, name) for dtype, name in DATATYPES.items()}
        self._memory_at = mpi.buffer.fromaddress
        self._interrupted = ""  # how a call was interrupted, after which this rank is out of step

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

    def run(self, name: str, group: Group | None, comm: Any, *args: Any) -> None:
        """Call a method of a communicator, with tensors as buffers, and wait for it."""
        # Collective over `group`.
        with self.mapped_errors(name):
            if limit_of(allowed_s(self._control.timeout_s, group)) is None:
                self._check_in_step(name)  # nothing to poll for: MPI's own wait is faster
                self._control.steps.begin(name_of(group), name)
                getattr(comm, name)(*map(self._as_buffer, args))
            else:
                start = getattr(comm, f"I{name.lower()}")
                number, started = self._begin(name, group, start, args)
                self._await(*started)
                self._release(number)

    def _begin(
        self, name: str, group: Group | None, start: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[int, _Started]:
        """Start a non-blocking call; return its number, and the arguments of `_await`."""
        # An interrupt at any moment leaves the memory of the call in `_held`.
        self._check_in_step(name)
        number = next(_numbers)
        buffers = [self._as_buffer(arg) for arg in args]
        entry = _held[number] = [args, buffers]
        step = self._control.steps.begin(name_of(group), name)
        self._under_way[number] = started = (name, group, step, start(*buffers))
        entry.append(started)
        return number, started

    def _release(self, number: int) -> None:
        self._under_way.pop(number, None)
        _held.pop(number, None)

    def _check_in_step(self, name: str) -> None:
        if self._interrupted:
            raise CollectiveError(
                f"{self._control.where(name)}: the ranks are out of step, since "
                f"{self._interrupted} here: end the job"
            )

    def mark_interrupted(self, how: str) -> None:
        """Record that a call was interrupted, which the other ranks may complete."""
        self._interrupted = self._interrupted or how
        self._end_at_exit(self._control.where(self._interrupted))

    def start(
        self, name: str, group: Group | None, comm: Any, tensor: Tensor, *args: Any
    ) -> Handle[Tensor]:
        """Start a non-blocking method with its result in `tensor`. Collective over `group`."""
        # Calls whose handles were dropped are released here, once they are done.
        for number, (*_, earlier) in list(self._under_way.items()):
            if self._is_done(earlier):
                self._release(number)
        with self.mapped_errors(name):
            _, started = self._begin(name, group, getattr(comm, name), args)

        def wait() -> Tensor:
            with self.mapped_errors(name):
                self._await(*started)
            return tensor

        def is_completed() -> bool:
            with self.mapped_errors(name):
                return self._is_done(started[-1])

        return Handle(wait, is_completed)

    def _is_done(self, request: Any) -> bool:
        with self._test_lock:
            return bool(request.Test())

    def finish(self) -> bool:
        """Wait for pending operations, and free the reductions made here.

        Returns False at once after an interrupted call, which may never end.
        """
        if self._interrupted:
            _held[next(_numbers)] = self._folds  # MPI may still call them
            return False
        with self.mapped_errors("finalize"):
            for number, started in list(self._under_way.items()):
                self._await(*started)
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

    def _await(self, name: str, group: Group | None, step: int, request: Any) -> None:
        """Wait for a call of `_begin`; its memory stays until `_release`."""
        check, check_at = Wait(self._control, group, name, step), time.monotonic() + LOOK_S
        for spins in itertools.count():
            if self._is_done(request):
                return
            if time.monotonic() >= check_at:
                try:
                    check()
                except CollectiveError:  # a later call would be out of step with the pending one
                    self.mark_interrupted(f"{name} failed")
                    raise
                check_at = time.monotonic() + LOOK_S
            if spins > _SPINS:
                time.sleep(0 if spins < 2 * _SPINS else 1e-4)  # 0 yields the core

    def _fail(self, name: str, error: Any) -> NoReturn:
        number = error.Get_error_class()
        classes = [key for key in dir(self._mpi) if key.startswith("ERR_")]
        names = " ".join(key for key in classes if getattr(self._mpi, key) == number)
        kind = matching_error(_ERRORS, names)
        remedy = _DIFFERENT if kind is CollectiveMismatchError else ""
        raise kind(f"{self._control.where(name)} failed: {error}{remedy}") from error


def _fold(step: Callable[..., Tensor], dtype: torch.dtype) -> Callable[[Any, Any, Any], None]:
    """Return a function for ``MPI.Op.Create`` that reduces by a function of torch."""

    def fold(source: Any, target: Any, _datatype: Any) -> None:
        if len(target):  # torch rejects an empty buffer
            into = torch.frombuffer(target, dtype=dtype)
            step(torch.frombuffer(source, dtype=dtype), into, out=into)

    return fold
