"""Exact emulation of dtypes and operations that a model does not support.

Movement: a dtype outside of the model's is sent as bytes. Reduction: a dtype that the model
lacks is computed in a wider one whose result, cast back, equals that of the narrow one (integers
wrap alike); where the model lacks that one too, the tensors are gathered and folded in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from unisono.collectives.call import check, compares, fold
from unisono.collectives.routing import Carrier, Reducer, carry, is_direct, route
from unisono.context import ContextState
from unisono.errors import PayloadError
from unisono.host.collectives import HostCollectives
from unisono.model.handle import Handle, joined
from unisono.model.reduction import (
    ReduceOp,
    as_ordered_ints,
    fold_tensors,
    is_order_of_floats,
    mean_factors,
)
from unisono.payload.codec import reason
from unisono.payload.tensors import as_bytes_tensor, is_dense, plain, why_not_dense
from unisono.topology import Group
from unisono.tracebacks import hides

__tracebackhide__ = hides

Restore = Callable[[Tensor], Tensor]
_SIGN = -(2**63)


def check_dense(tensor: Tensor, call: str) -> None:
    """Raise if a tensor isn't plain dense memory, before anything is sent."""
    if not is_dense(tensor):
        raise PayloadError(f"{call} takes dense tensors, {why_not_dense(tensor)}")


def check_writable(tensor: Tensor, call: str) -> None:
    """Raise if a tensor can't be overwritten, before anything is sent."""
    check_dense(tensor, call)
    if not tensor.is_contiguous() and _overlaps(tensor):
        raise PayloadError(
            f"{call} writes into its tensor, but several elements of this one (shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())}) are one place in memory: pass "
            "tensor.contiguous()"
        )


def _overlaps(tensor: Tensor) -> bool:
    # A dimension of size 1 may have any stride, since nothing steps along it.
    dims = [pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] != 1]
    if any(size == 0 for _, size in dims):
        return False
    if any(stride == 0 for stride, _ in dims):
        return True
    reach = 0
    # No two elements share a place if each stride exceeds the reach of all smaller ones together.
    for stride, size in sorted(dims):
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    # Otherwise they may still not, as with shape [2, 3] and strides 3 and 2: compare all places.
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return bool((places.reshape(-1).sort().values.diff() == 0).any())


def check_reducible(tensor: Tensor, op: ReduceOp) -> None:
    """Raise if `op` is undefined for a tensor, before anything is sent."""
    try:
        if not is_dense(tensor):
            check_dense(tensor, f"all_reduce {op.name}")
        if op is ReduceOp.SUM:
            return
        dtype = tensor.dtype
    except PayloadError:
        raise
    except Exception as error:  # a subclass's own code may raise anything
        raise PayloadError(f"{op.name} of this tensor: {reason(error)}") from error
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if op.is_bitwise and is_inexact:
        raise PayloadError(f"{op.name} works on integer and bool tensors, not on {dtype}")
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise PayloadError(f"{op.name} isn't defined on {dtype}")
    if op is ReduceOp.AVERAGE and not is_inexact:
        raise PayloadError(
            f"AVERAGE of {dtype} would lose its fraction: pass tensor.float() or tensor.double()"
        )


def own(context: ContextState, tensor: Tensor) -> Tensor:
    """Copy a tensor into new contiguous memory on the model's transport device."""
    values = plain(tensor).resolve_conj().resolve_neg()
    moved = values.to(context.model.transport_device)
    # Resolving a lazy conjugate or negation copies, too, which only the address shows.
    is_copy = moved is not values or moved.data_ptr() != tensor.data_ptr()
    # At most one element is contiguous whatever its strides are; a model may view its bytes.
    if is_copy and moved.is_contiguous() and moved.numel() > 1:
        return moved
    return moved.clone(memory_format=torch.contiguous_format)


def lend(context: ContextState, tensor: Tensor, group: Group | None) -> Tensor:
    """Return the user's memory where its carrier only reads it, else a copy as `own` does."""
    # One on an accelerator has no carrier of its own: that of its copy is recorded.
    if not tensor.is_cpu or type(carry(context, tensor, group)) is not HostCollectives:
        return own(context, tensor)
    return plain(tensor).resolve_conj().resolve_neg().contiguous()


def fill(tensor: Tensor, total: Tensor) -> Tensor:
    """Overwrite a user's tensor without autograd, and return it."""
    # A tensor made in inference mode can be written to in inference mode only.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        plain(tensor).copy_(total)
    return tensor


def movement(tensors: Carrier, tensor: Tensor) -> tuple[Tensor, Restore]:
    """Return a tensor [*shape] in a dtype that can be moved, and the inverse conversion."""
    if tensor.dtype in tensors.dtypes:
        return tensor, _same
    dtype = tensor.dtype
    # The last dimension holds the bytes of one element; the view shrinks it to size 1.
    return as_bytes_tensor(tensor), lambda rows: rows.contiguous().view(dtype).squeeze(-1)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _guise(tensor: Tensor, op: ReduceOp, size: int) -> tuple[Tensor, ReduceOp, Restore]:
    """Return a tensor and operation that emulate `op`, and the inverse conversion."""
    dtype = tensor.dtype
    if op is ReduceOp.AVERAGE:  # first: it handles complex and narrow dtypes itself
        return _guise_average(tensor, size)
    if dtype.is_complex and op is ReduceOp.SUM:
        return torch.view_as_real(tensor), op, torch.view_as_complex
    # With its highest bit flipped, uint64 has the order of int64.
    if dtype is torch.uint64 and op in (ReduceOp.MIN, ReduceOp.MAX):
        flipped = tensor.view(torch.int64) ^ _SIGN
        return flipped, op, lambda total: (total ^ _SIGN).view(torch.uint64)
    if not dtype.is_floating_point and not dtype.is_complex:
        return tensor.to(torch.int64), op, lambda total: total.to(dtype)  # of bool, too
    if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize:
        # MIN and MAX need another conversion even in float32.
        wide, step, back = _guise(tensor.to(torch.float32), op, size)
        return wide, step, lambda total: back(total).to(dtype)
    if is_order_of_floats(tensor, op):
        keys, restore = as_ordered_ints(tensor, op)
        return keys, op, restore
    return tensor, op, _same


def _guise_average(tensor: Tensor, size: int) -> tuple[Tensor, ReduceOp, Restore]:
    """Sum terms scaled by a power of two, so that no sum overflows unless the mean does."""
    # Scaling is exact but for numbers near the smallest, which for float16 begin at 6e-5: it is
    # always computed in float32.
    dtype = tensor.dtype
    if dtype.is_complex:
        parts, step, back = _guise_average(torch.view_as_real(tensor), size)
        return parts, step, lambda total: torch.view_as_complex(back(total))
    if dtype.itemsize < torch.float32.itemsize:
        wide, step, back = _scaled(tensor.to(torch.float32), size)
        return wide, step, lambda total: back(total).to(dtype)
    return _scaled(tensor, size)


def _scaled(tensor: Tensor, size: int) -> tuple[Tensor, ReduceOp, Restore]:
    before, after = mean_factors(size)
    if size > 1:
        tensor.mul_(before)  # our own copy
    return tensor, ReduceOp.SUM, lambda total: total / after


def _carrier(
    context: ContextState, tensors: Reducer, tensor: Tensor, op: ReduceOp, group: Group | None
) -> tuple[Tensor, ReduceOp, Restore]:
    """Convert as `_guise` does, only where `tensors` need it. Overwrites `tensor`, once."""
    if is_direct(tensors, tensor, op):
        return tensor, op, _same
    size, dtype = context.model.topology.size(group), tensor.dtype
    if op is ReduceOp.AVERAGE and dtype is torch.bfloat16 and dtype in tensors.dtypes:
        return _scaled(tensor, size)  # its range is float32's: it needs no wider dtype
    return _guise(tensor, op, size)


def all_gather(tensors: Carrier, tensor: Tensor, group: Group | None) -> Tensor:
    """Gather [*shape] to [n, *shape]. Collective over `group`."""
    carrier, restore = movement(tensors, tensor)
    return restore(tensors.all_gather(carrier, group))


def _fold(tensors: Carrier, carrier: Tensor, op: ReduceOp, group: Group | None) -> Tensor:
    return fold_tensors(op, all_gather(tensors, carrier.contiguous(), group))


def all_reduce(
    context: ContextState, tensor: Tensor, op: ReduceOp, group: Group | None, device: torch.device
) -> Tensor:
    """Reduce a tensor of ours, [*shape], and return the result on `device`."""
    # Collective over `group`.
    tensors = route(context, tensor, group)
    # An exchange uses the model's dtypes: precision doesn't depend on the size of a tensor.
    carrier, step, restore = _carrier(context, tensors or context.model, tensor, op, group)
    if tensors is None:
        total = fold(context, carrier.contiguous(), step, group)
    else:
        check(context, f"all_reduce {op.name}", tensor, group, tensors)
        if carrier.dtype in tensors.dtypes:
            total = tensors.all_reduce(carrier, step, group)
        else:
            # Not over `tensors`: memory in two levels only reduces, and this gathers.
            total = _fold(carry(context, carrier, group), carrier, step, group)
    return restore(total).to(device)


def start_all_reduce(
    context: ContextState, tensor: Tensor, op: ReduceOp, group: Group | None
) -> Handle[Tensor]:
    """Start `all_reduce` on a tensor of ours. Collective over `group`."""
    # The first call of a group waits for the other ranks, too: the background thread can wait.
    if not context.control.has_met(group) or route(context, tensor, group) is not context.model:
        with torch.inference_mode(False):  # the thread isn't in that mode
            tensor = tensor.clone() if tensor.is_inference() else tensor
        call = partial(all_reduce, context, tensor, op, group, tensor.device)
        return context.start(call, group)
    carrier, step, restore = _carrier(context, context.model, tensor, op, group)
    if carrier.dtype not in context.model.dtypes:  # not a single operation, but a gather and a fold
        call = partial(_reduce_folded, context, tensor, carrier, op, step, group)
        return context.start(call, group).then(restore)

    def begin() -> Handle[Tensor]:
        check(context, f"all_reduce {op.name}", tensor, group)
        return context.start_all_reduce(carrier, step, group)

    # Comparing calls waits for the other ranks; starting an operation must not.
    started = joined(context.start(begin, group)) if compares(context, group) else begin()
    return started.then(restore)


def _reduce_folded(
    context: ContextState,
    tensor: Tensor,
    carrier: Tensor,
    op: ReduceOp,
    step: ReduceOp,
    group: Group | None,
) -> Tensor:
    check(context, f"all_reduce {op.name}", tensor, group)
    return _fold(context.model, carrier, step, group)


def reduce(
    context: ContextState, tensor: Tensor, dst: int, op: ReduceOp, group: Group | None
) -> Tensor | None:
    """Reduce a tensor of ours to global rank `dst`. Collective over `group`."""
    tensors = carry(context, tensor, group)
    check(context, f"reduce {op.name} to {dst}", tensor, group, tensors)
    carrier, step, restore = _carrier(context, tensors, tensor, op, group)
    if carrier.dtype in tensors.dtypes:
        total = tensors.reduce(carrier.contiguous(), dst, step, group)
        return None if total is None else restore(total)
    total = _fold(tensors, carrier, step, group)
    return restore(total) if context.model.topology.rank == dst else None


def reduce_scatter(
    context: ContextState, rows: Tensor, op: ReduceOp, group: Group | None
) -> Tensor:
    """Reduce [n, *shape] and return this rank's row. Collective over `group`."""
    tensors = carry(context, rows, group)
    check(context, f"reduce_scatter {op.name}", rows, group, tensors)
    carrier, step, restore = _carrier(context, tensors, rows, op, group)
    if carrier.dtype in tensors.dtypes:
        return restore(tensors.reduce_scatter(carrier.contiguous(), step, group))
    return restore(_fold(tensors, carrier, step, group)[context.model.topology.position(group)])
