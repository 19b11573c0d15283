"""Coalesced collectives: large tensors in place, small ones in flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.collectives.broadcasts import broadcast_
from unisono.collectives.reductions import all_reduce_
from unisono.collectives.routing import reduces_natively
from unisono.context import ContextState
from unisono.host.collectives import HostCollectives
from unisono.model.handle import Handle
from unisono.model.reduction import ReduceOp, mean_factors
from unisono.topology import Group

MEGABYTE = 2**20
# Measured on gloo with the tensors of a ResNet-50. Above _LARGE_BYTES a copy costs more than one
# more collective; more than _IN_FLIGHT collectives at a time gain nothing.
_LARGE_BYTES = MEGABYTE
_IN_FLIGHT = 8
BUCKET_BYTES = 16 * MEGABYTE

Work = tuple[Tensor, bool]
"""A tensor, and whether its memory can be sent: it has no gaps, and one order on all ranks."""


def _in_memory_order(work: Work) -> Tensor | None:
    """Return a view [numel] of a tensor's memory, or None if that can't be sent."""
    tensor, is_ordered_alike = work
    return tensor.detach().as_strided((tensor.numel(),), (1,)) if is_ordered_alike else None


def buckets(tensors: Sequence[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    """Split tensors into runs of one dtype and device: one tensor, or at most `limit_bytes`."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for members in kinds.values():
        run: list[Tensor] = []
        size = 0
        for tensor in members:
            if run and size + tensor.nbytes > limit_bytes:
                yield run
                run, size = [], 0
            run.append(tensor)
            size += tensor.nbytes
        yield run


@contextmanager
def packed(
    context: ContextState, tensors: Sequence[Tensor], *, copies_back: bool = True
) -> Iterator[Tensor]:
    """Copy tensors of one dtype and device into a flat buffer, and back after the block."""
    # The context keeps one buffer for each dtype and device. A call removes it from there, as
    # another thread may average over another group meanwhile; after an error the buffer is dropped,
    # as the failed operation may still write to it.
    sizes = [tensor.numel() for tensor in tensors]
    first, count = tensors[0], sum(sizes)
    key = (first.dtype, first.device)
    buffer = context.flat_buffers.pop(key, None)
    if buffer is None or buffer.numel() < count:
        buffer = first.new_empty(count, requires_grad=False)
    flat = buffer[:count]
    torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=flat)
    yield flat
    if copies_back:
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
    # Several tensors are within the bucket size; one may be huge, and its buffer isn't kept.
    if len(tensors) > 1 or buffer.nbytes <= BUCKET_BYTES:
        context.flat_buffers[key] = buffer


def _split(
    context: ContextState, works: Sequence[Work], bucket_bytes: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return large tensors, as views [numel], and the tensors to copy into buckets."""
    alone, together = [], []
    model = context.model
    for work in works:
        tensor, memory = work[0], _in_memory_order(work)
        # With bucket_bytes=0, from coalesce=False, every tensor counts as large.
        is_large = tensor.nbytes >= min(_LARGE_BYTES, bucket_bytes)
        # A large tensor that isn't ready must be copied anyway, so it may go into a bucket.
        is_ready = tensor.dtype in model.dtypes and tensor.device == model.transport_device
        if memory is not None and is_large and is_ready:
            alone.append(memory)
        elif tensor.numel():
            together.append(tensor)
    return alone, together


def _reduce_on_host(
    context: ContextState,
    works: Sequence[Work],
    op: ReduceOp,
    bucket_bytes: int,
    group: Group | None,
) -> list[Work]:
    """Reduce the tensors that shared memory supports, without a copy; return the rest."""
    # Collective over `group`.
    # Beside an accelerator, ranks may have a tensor on different devices, and would choose
    # different routes.
    if context.model.device.type != "cpu":
        return list(works)
    large: list[Tensor] = []
    small: list[Tensor] = []
    others: list[Work] = []
    host = None
    for work in works:
        tensor, memory = work[0], _in_memory_order(work)
        plane = context.control.memory(group) if tensor.is_cpu else None
        is_supported = plane is not None and tensor.numel() and reduces_natively(plane, tensor, op)
        if plane is None or memory is None or not is_supported:
            others.append(work)
            continue
        host = plane  # the same for each tensor, as a group has one
        is_large = memory.nbytes >= min(host.large_bytes, bucket_bytes)
        (large if is_large else small).append(memory)
    if host is not None:
        for memory in large:
            host.all_reduce(memory, op)
        for run in buckets(small, min(host.block_bytes, bucket_bytes)):
            if isinstance(host, HostCollectives):  # all ranks of the group are on this host
                host.all_reduce_packed(run, op)
                continue
            with packed(context, run) as flat:
                host.all_reduce(flat, op)
    return others


def reduce_all(
    context: ContextState,
    works: Sequence[Work],
    op: ReduceOp,
    bucket_bytes: int,
    group: Group | None,
) -> None:
    """Reduce tensors in place. Collective over `group`."""
    works = _reduce_on_host(context, works, op, bucket_bytes, group)
    is_mean = op is ReduceOp.AVERAGE
    step = ReduceOp.SUM if is_mean else op
    size = context.model.topology.size(group)
    # A mean is a sum between two factors, as an undivided sum may overflow where the mean doesn't.
    before, after = mean_factors(size) if is_mean else (1.0, 1.0)
    alone, together = _split(context, works, bucket_bytes)
    under_way: list[Handle[Tensor]] = []

    def start(memory: Tensor) -> None:
        if before != 1:
            memory.mul_(before)
        under_way.append(all_reduce_(memory, step, group, async_op=True))

    def finish(remaining: int) -> None:
        while len(under_way) > remaining:
            total = under_way.pop(0).wait()
            if after != 1:
                total.div_(after)

    for memory in alone:
        finish(_IN_FLIGHT - 1)
        start(memory)
    for run in buckets(together, bucket_bytes):
        with packed(context, run) as flat:
            start(flat)
            finish(0)  # leaving `packed` copies the result back
    finish(0)


def broadcast_all(
    context: ContextState, works: Sequence[Work], src: int, group: Group | None
) -> None:
    """Overwrite tensors on every rank with those of `src`. Collective over `group`."""
    alone, together = _split(context, works, BUCKET_BYTES)
    for memory in alone:
        broadcast_(memory, src, group)
    is_src = context.model.topology.rank == src
    for run in buckets(together, BUCKET_BYTES):
        with packed(context, run, copies_back=not is_src) as flat:
            broadcast_(flat, src, group)
