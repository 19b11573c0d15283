"""Exact sums of tensors: their limbs are integers, which the ordinary all_reduce adds.

One exchange tells all ranks which exponents are in use. Then block by block each rank cuts its
terms into limbs (`model/superaccumulator`), the ranks add these, and each rounds the sum.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as carriers
from unisono.collectives.call import swap
from unisono.context import ContextState
from unisono.errors import PayloadError
from unisono.model.reduction import ReduceOp
from unisono.model.superaccumulator import FORMATS, Span, add, layout, rounded, span
from unisono.payload.tensors import plain
from unisono.topology import Group
from unisono.tracebacks import hides

__tracebackhide__ = hides

BLOCK = 1 << 16
"""Numbers in one block: those of a core's cache, and what a rank keeps of limbs at a time."""
_COUNT = struct.Struct("<Q")
_SPAN = struct.Struct("<Hh?")  # low, high, whether it is marked


def check_summable(tensor: Tensor) -> None:
    """Refuse floats that have no exact sum."""
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype not in FORMATS:
        raise PayloadError(f"there is no exact sum of {dtype}: pass tensor.float()")


def sum_exactly(
    context: ContextState, call: str, tensors: Sequence[Tensor], group: Group | None
) -> list[Tensor]:
    """Sum the terms of all ranks. Collective over `group`."""
    sums: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        rows = [_rows(context, tensors[i]) for i in places]
        total = _sum(context, call, rows[0] if len(rows) == 1 else torch.cat(rows, 1), group)
        parts = torch.split(total, [row.shape[1] for row in rows])
        for i, part in zip(places, parts, strict=True):
            device, shape = tensors[i].device, tensors[i].shape[1:]
            sums[i] = part.reshape(shape).to(device, copy=len(parts) > 1)
    return [sums[i] for i in range(len(tensors))]


def _rows(context: ContextState, tensor: Tensor) -> Tensor:
    """See [k, *shape] as [k, n], where the model takes tensors."""
    values = plain(tensor).resolve_conj().resolve_neg().to(context.model.transport_device)
    return values.reshape(tensor.shape[0], tensor.shape[1:].numel())


def _sum(context: ContextState, call: str, terms: Tensor, group: Group | None) -> Tensor:
    """Sum [k, n] of all ranks to [n]."""
    if terms.is_complex():
        parts = torch.view_as_real(terms.contiguous()).flatten(1)
        return torch.view_as_complex(_sum(context, call, parts, group).view(-1, 2))
    if terms.dtype not in FORMATS:
        mine = _sum_of_integers(terms)
        return carriers.all_reduce(context, mine, ReduceOp.SUM, group, mine.device)
    blocks = torch.split(terms, BLOCK, dim=1)
    spans, count = _agree(context, call, terms, [span(block) for block in blocks], group)
    total = terms.new_zeros(terms.shape[1])
    for found, block, into in zip(spans, blocks, torch.split(total, BLOCK), strict=True):
        plan = layout(found, terms.dtype, count)
        if plan is not None:
            limbs = add(block, plan)
            limbs = carriers.all_reduce(context, limbs, ReduceOp.SUM, group, limbs.device)
            into.copy_(rounded(limbs, plan, terms.dtype))
    return total


def _sum_of_integers(terms: Tensor) -> Tensor:
    """Sum [k, n] to [n], new memory: bools by OR, and integers wrap, as in `all_reduce`."""
    dtype = terms.dtype
    if dtype is torch.bool:
        return terms.any(0)
    wide = terms.view(torch.int64) if dtype is torch.uint64 else terms.to(torch.int64)
    total = wide.sum(0)
    return total.view(dtype) if dtype is torch.uint64 else total.to(dtype)


def _agree(
    context: ContextState, call: str, terms: Tensor, spans: Sequence[Span], group: Group | None
) -> tuple[list[Span], int]:
    """Return all ranks' spans of each block and numbers of terms. Collective over `group`."""
    # A rank's frame: how many terms it has as uint64, then for each block low as uint16, high as
    # int16 and a byte that says whether it is marked, little-endian.
    packed = [_SPAN.pack(each.low, each.high, each.is_marked) for each in spans]
    frame = b"".join([_COUNT.pack(terms.shape[0]), *packed])
    frames = swap(context, f"{call} of {terms.shape[1]} {terms.dtype}", frame, group)
    count = sum(_COUNT.unpack_from(frame)[0] for frame in frames)
    rows = [_SPAN.iter_unpack(memoryview(frame)[_COUNT.size :]) for frame in frames]
    return [
        Span.of_all(Span(*each) for each in column) for column in zip(*rows, strict=True)
    ], count
