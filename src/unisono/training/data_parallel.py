"""Data-parallel training over any communication model that has all_reduce."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.collectives.call import exchange_blobs
from unisono.collectives.reductions import all_reduce_
from unisono.context import ContextState, communicator, current, current_model
from unisono.control.signatures import called
from unisono.errors import (
    ArgumentError,
    CollectiveError,
    ContextError,
    PayloadError,
    UnsupportedOperation,
)
from unisono.model.handle import Handle
from unisono.topology import Group
from unisono.training.averaging import broadcast_params
from unisono.training.buckets import MEGABYTE, buckets


class _Bucket:
    """Gradients reduced together, with, for each gradient, the number of ranks that have it."""

    # The counts show, without another collective, which parameters have a gradient on some rank; a
    # rank that lacks the gradient contributes zero. A parameter without a gradient on any rank
    # keeps None. The last bucket also has `late_counts`: for each bucket, how many ranks sent it
    # before its last gradient.

    def __init__(self, name: str, parameters: Sequence[Tensor], late_counts: int) -> None:
        first = parameters[0]
        self.name, self.parameters = name, parameters
        sizes = [*(p.numel() for p in parameters), len(parameters), late_counts]
        self.flat = torch.zeros(
            sum(sizes), dtype=first.dtype, device=first.device, requires_grad=False
        )
        *parts, self.counts, self.late_counts = torch.split(self.flat, sizes)
        self.parts = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self.handle: Handle[Tensor] | None = None

    def start(self, touched: set[int] | None, size: int, late: Sequence[bool] = ()) -> None:
        """Copy the gradients into the buffer and start their sum. Collective over all ranks."""
        # `touched` is None if this rank only takes part in the backward of other ranks.
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            # The gradient may come from an earlier backward.
            if touched is not None and parameter.grad is not None:
                # Divided before the sum, which could overflow even if the mean doesn't.
                torch.div(parameter.grad, size, out=part)
            else:
                part.zero_()
        has = [id(p) in (touched or ()) and p.grad is not None for p in self.parameters]
        # On the CPU explicitly, as torch's default device may be another one.
        self.counts.copy_(torch.tensor(has, device="cpu"))
        if self.late_counts.numel():
            self.late_counts.copy_(torch.tensor(late, device="cpu"))
        with called(self.name):
            self.handle = all_reduce_(self.flat, "SUM", async_op=True)

    def wait(self) -> None:
        """Wait for the sum that `start` began."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.wait()

    def copy_back(self, touched: set[int]) -> None:
        """Copy the averaged gradients back to the parameters."""
        counts: list[Any] | None = None
        for i, (parameter, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            if id(parameter) in touched and parameter.grad is not None:
                parameter.grad.copy_(part)
                continue
            # Read only if needed, since reading waits for an accelerator.
            counts = self.counts.tolist() if counts is None else counts
            if counts[i]:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part)


def name_of_gradients(context: ContextState, module: nn.Module, group: Group | None) -> str:
    """Return a name for gradients, equal on ranks that wrap the same models in the same order."""
    number = context.control.steps.count_model(group)
    return f"gradients of backward of {type(module).__name__} (model {number})"


class Averager:
    """Averages the gradients of a module in one context."""

    # Every rank must create one, with the same parameters, though creation sends nothing.
    # A bucket is sent as soon as all its parameters have a gradient, except the last bucket, which
    # is sent at the end of backward. By then the rank knows which parameters got another gradient
    # after their bucket was sent, as under reentrant checkpointing. The last bucket carries, for
    # each other bucket, how many ranks saw such a gradient; a bucket with a number above 0 is sent
    # again.

    def __init__(self, module: nn.Module, bucket_bytes: int, name: str | None = None) -> None:
        context = current()
        self._context_id = context.context_id
        self._size = context.model.topology.world_size
        # Backward reaches the last parameters first.
        parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        self.parameter_ids: set[int] = {id(parameter) for parameter in parameters}
        self.bucket_bytes = bucket_bytes
        self._bucket_parameters = list(buckets(parameters, bucket_bytes))
        self.name: str = name or name_of_gradients(context, module, None)
        self._bucket_of = {
            id(p): i for i, members in enumerate(self._bucket_parameters) for p in members
        }
        self.release: weakref.finalize[..., Any]
        self.release = hook_gradients(self.on_gradient, parameters, self)
        self.is_syncing = True
        # Ids of parameters that got a gradient since the last sum, also in `no_sync`.
        self._touched: set[int] = set()
        self._fired: set[int] = set()  # ids of those that got one in this backward
        self._late: set[int] = set()  # buckets of this backward sent before their last gradient
        self._is_running = False
        self._missing: list[int] = []  # of each bucket, parameters without a gradient so far
        self._next = 0  # the bucket to send next; buckets are sent in order, as on every rank

    @cached_property
    def _buckets(self) -> list[_Bucket]:
        # Created in the first backward: a module that never runs backward, such as a copy that
        # holds averaged weights, needs no buckets.
        count = len(self._bucket_parameters)
        late_counts = [0] * (count - 1) + [count]
        # Not strict, as without trainable parameters there is no bucket but one count.
        return [
            _Bucket(f"{self.name}, bucket {i}", *each)
            for i, each in enumerate(zip(self._bucket_parameters, late_counts, strict=False))
        ]

    @property
    def is_current(self) -> bool:
        """Whether the context of this averager is active."""
        return current().context_id == self._context_id

    def reset(self) -> None:
        """Wait for buckets that an interrupted backward sent, and discard its state."""
        if self._is_running:
            for bucket in self._buckets:
                # That backward has failed already; another error of it would add nothing.
                with suppress(CollectiveError):
                    bucket.wait()
        self._is_running = False

    def on_gradient(self, parameter: Tensor) -> None:
        """Record a gradient, and start the sum of its bucket once the bucket is complete."""
        # Collective over all ranks; nothing happens outside the context of creation.
        if not self.is_current:
            return
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise PayloadError(
                f"a gradient of shape {list(parameter.shape)} is sparse, but only dense gradients "
                "can be averaged: use sparse=False"
            )
        key = id(parameter)
        self._touched.add(key)
        if not self.is_syncing:
            return
        if not self._is_running:  # the first gradient of this backward
            self._is_running = True
            self._next = 0
            self._fired.clear()
            self._late.clear()
            self._missing = [len(members) for members in self._bucket_parameters]
            call_after_backward(self._end)
        index = self._bucket_of[key]
        if key not in self._fired:
            self._fired.add(key)
            self._missing[index] -= 1
        elif index < self._next:
            self._late.add(index)
        with torch.no_grad():
            while self._next < len(self._buckets) - 1 and self._missing[self._next] == 0:
                self._start_next(self._touched)

    def _start_next(self, touched: set[int] | None) -> None:
        """Start the sum of the next bucket; the last one carries `late_counts`."""
        bucket = self._buckets[self._next]
        late = [index in self._late for index in range(bucket.late_counts.numel())]
        bucket.start(touched, self._size, late)
        self._next += 1

    def _end(self) -> None:
        """Finish the averages at the end of a backward."""
        if self._is_running:
            self._finish(self._touched)

    def _finish(self, touched: set[int] | None) -> None:
        """Send the remaining buckets, and copy all averages back to the parameters."""
        with torch.no_grad():
            while self._next < len(self._buckets):
                self._start_next(touched)
            for bucket in self._buckets:
                bucket.wait()
            # The counts were summed, so that all ranks send the same buckets again.
            # A single bucket is the last one, which is never sent too early.
            late_counts = self._buckets[-1].late_counts.tolist() if len(self._buckets) > 1 else []
            for bucket, count in zip(self._buckets, late_counts, strict=False):
                if count:
                    bucket.start(touched, self._size)
                    bucket.wait()
            if touched is not None:
                for bucket in self._buckets:
                    bucket.copy_back(touched)
        self._is_running = False
        self._touched.clear()

    def shadow(self) -> None:
        """Contribute zeros to the other ranks' backward. Collective over all ranks."""
        self._late.clear()
        self._next = 0
        self._finish(None)


def hook_gradients(
    on_gradient: Callable[[Tensor], None], parameters: Sequence[Tensor], owner: object
) -> weakref.finalize[..., Any]:
    """Call a method after each gradient, until `owner` is deleted or the result is called."""
    method = weakref.WeakMethod(on_gradient)  # parameters must not keep its object alive

    def call(parameter: Tensor) -> None:
        alive = method()
        if alive is not None:
            alive(parameter)

    hooks: list[RemovableHandle] = [
        parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
        for parameter in parameters
    ]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    finalizer = weakref.finalize(owner, remove)
    finalizer.atexit = False  # at exit there is no need to remove hooks
    return finalizer


def call_after_backward(call: Callable[[], None]) -> None:
    """Call a function at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


_JOIN = "a step of join"
# In each step of `join`, ranks exchange one of these marks: a forward whose backward averages; such
# a forward in evaluation mode, which sends no buffers; a forward in `no_sync`; a rank
# without batches left.
_SYNCS, _SYNCS_IN_EVAL, _ACCUMULATES, _HAS_ENDED = b"s", b"v", b"a", b"e"
# Options of DistributedDataParallel whose behaviour is always on here, or that have no effect.
_NEEDLESS = frozenset(
    {"find_unused_parameters", "gradient_as_bucket_view", "static_graph", "check_reduction"}
)
_alive: weakref.WeakSet[Replicated] = weakref.WeakSet()


class Replicated(nn.Module):
    """What `auto_model` returns on communication models without a data-parallel wrapper.

    Collective at creation, over all ranks: parameters and buffers become those of rank 0. When
    backward returns, gradients are the mean over all ranks; each bucket of them is reduced as soon
    as it is complete, while backward continues. Each backward must reach some parameter on every
    rank.

    Args:
        module: the module; available as ``.module``.
        bucket_cap_mb: MiB of gradients that are reduced together.
        broadcast_buffers: whether buffers become those of rank 0 before each forward in training.
        options: options of ``DistributedDataParallel`` without effect here.

    Raises:
        CollectiveMismatchError: the modules differ between ranks; the message shows the first
            difference (on every rank).
        PayloadError: an embedding has sparse gradients.
        UnsupportedOperation: an option of ``DistributedDataParallel`` that isn't supported here.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        unsupported = ", ".join(sorted(set(options) - _NEEDLESS))
        if unsupported:
            raise UnsupportedOperation(
                current_model().name, f"option {unsupported} of auto_model", "leave it out"
            )
        # 25 is DistributedDataParallel's default.
        size_mb = 25 if bucket_cap_mb is None else bucket_cap_mb
        if not size_mb > 0:  # includes NaN
            raise ArgumentError(f"bucket_cap_mb={bucket_cap_mb!r} should be over 0")
        sparse = [name for name, part in module.named_modules() if getattr(part, "sparse", False)]
        if sparse:
            raise PayloadError(
                f"{', '.join(sparse)} has sparse gradients, but only dense gradients can be "
                "averaged: use sparse=False"
            )
        broadcast_params(module)
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self._averager = Averager(module, int(size_mb * MEGABYTE))
        self._is_joining = False
        self._leader = 0  # the rank whose parameters all ranks get at the end of `join`
        _alive.add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over all ranks in training, if the module has buffers."""
        # Without gradients no backward follows, and a rank may run alone.
        if torch.is_grad_enabled():
            if not self._averager.is_current:
                raise ContextError(
                    "this model was wrapped in a context other than the active one "
                    f"({current_model().name}): call auto_model again after initialize"
                )
            self._averager.reset()  # after a backward that failed
            mark = _ACCUMULATES
            if self._averager.is_syncing:
                mark = _SYNCS if self.training else _SYNCS_IN_EVAL
            src = 0  # in `join` rank 0 may have ended
            if self._is_joining:
                src = self._first_active(exchange_blobs(communicator(), _JOIN, mark, None))
            if mark == _SYNCS:
                self._broadcast_buffers(src)
        return self.module(*args, **kwargs)

    def _first_active(self, marks: list[bytes]) -> int:
        """Record and return the first rank with batches left, of which there must be one."""
        # At the end of `join` all ranks get the parameters of the rank recorded last.
        self._leader = next(rank for rank, mark in enumerate(marks) if mark != _HAS_ENDED)
        return self._leader

    def _broadcast_buffers(self, src: int) -> None:
        buffers = list(self.module.buffers()) if self.broadcast_buffers else []
        if buffers:
            broadcast_params(buffers, src)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the first backward after the block averages them."""
        before = self._averager.is_syncing
        self._averager.is_syncing = False
        try:
            yield
        finally:
            self._averager.is_syncing = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Allow ranks different numbers of batches: a rank that has ended contributes zeros.

        Collective over all ranks, which enter and leave together. Each forward within must be
        followed by its backward. At the end all have the parameters and buffers of the rank with
        the most batches. Layers that call collectives, such as synchronised batch norm, aren't
        supported.
        """
        self._is_joining = True
        try:
            yield
        finally:
            self._is_joining = False
        while True:
            # Without batches, this rank takes part in other ranks' steps until all have ended.
            marks = exchange_blobs(communicator(), _JOIN, _HAS_ENDED, None)
            if all(mark == _HAS_ENDED for mark in marks):
                break
            src = self._first_active(marks)
            # Ranks with batches left run the same step, so that the mark of one counts for all.
            if marks[src] == _SYNCS:
                self._broadcast_buffers(src)
            if marks[src] != _ACCUMULATES:
                self._averager.shadow()
        broadcast_params(self.module, self._leader)

    def release(self) -> None:
        """Stop averaging gradients in backward; an optimizer averages them instead."""
        self._averager.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicated:
        made = memo[id(self)] = type(self).__new__(type(self))
        state = {name: item for name, item in self.__dict__.items() if name != "_averager"}
        made.__dict__.update(copy.deepcopy(state, memo))
        # Keep the name: a new one would take the next number, and ranks that make no copy would
        # then disagree.
        averager = self._averager
        made._averager = Averager(made.module, averager.bucket_bytes, averager.name)
        _alive.add(made)
        return made

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentError(
            "a model that auto_model wrapped belongs to its context and can't be pickled: use its "
            ".module, or copy.deepcopy for a copy"
        )


def owners(parameters: Iterable[nn.Parameter]) -> list[Replicated]:
    """List the wrappers of the active context that average one of these parameters."""
    keys = {id(parameter) for parameter in parameters}
    # Copied first, as replicas that are threads may add wrappers meanwhile.
    averagers = [(each, each._averager) for each in list(_alive)]
    return [
        each
        for each, averager in averagers
        if averager.parameter_ids & keys and averager.is_current
    ]
