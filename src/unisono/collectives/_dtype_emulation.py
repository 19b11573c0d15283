"""Exact emulation of dtypes and operations that a model does not support.

A tensor whose dtype the model lacks is moved as bytes. To reduce it, it is converted to a wider
dtype, whose result, cast back, equals that of the narrow dtype (integers wrap alike). If the model
lacks the wider dtype as well, the tensors are gathered and folded in rank order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from unisono.collectives.call import compare_calls, compares, exchange_blobs, signature
from unisono.collectives.routing import Plane, Reducer, plane_for, reducer_for, reduces_natively
from unisono.context import ContextState
from unisono.errors import PayloadError
from unisono.host import memory
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
from unisono.payload.tensors import (
    as_bytes_tensor,
    is_dense,
    plain,
    stack_bytes,
    to_bytes,
    why_not_dense,
)
from unisono.topology import Group

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
    """Return whether several elements of a tensor have one place in memory."""
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
    # Otherwise each element may still have its own place, as with shape [2, 3] and strides 3 and 2,
    # so all places are compared.
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return bool((places.reshape(-1).sort().values.diff() == 0).any())


def check_reducible(tensor: Tensor, op: ReduceOp) -> None:
    """Raise if `op` is undefined for a tensor, before anything is sent."""
    try:
        if not is_dense(tensor):
            check_dense(tensor, f"all_reduce {op.name}")
        if op is ReduceOp.SUM:  # defined on every dtype
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


def private_copy(context: ContextState, tensor: Tensor) -> Tensor:
    """Copy a tensor into new contiguous memory on the model's transport device."""
    values = plain(tensor).resolve_conj().resolve_neg()
    moved = values.to(context.model.transport_device)
    # Resolving a lazy conjugate or negation copies, too, which only the address shows.
    is_copy = moved is not values or moved.data_ptr() != tensor.data_ptr()
    # A tensor of 0 or 1 elements counts as contiguous whatever its strides, but viewing it as bytes
    # needs stride 1.
    if is_copy and moved.is_contiguous() and moved.numel() > 1:
        return moved
    return moved.clone(memory_format=torch.contiguous_format)


def view_or_copy(
    context: ContextState, tensor: Tensor, plane: Reducer, *, is_read: bool = True
) -> Tensor:
    """Return a contiguous view of a plain tensor if it will only be read, else a copy."""
    # Only collectives through shared memory of one host don't overwrite the tensor.
    if is_read and type(plane) is HostCollectives and tensor.is_cpu:
        return tensor.resolve_conj().resolve_neg().contiguous()
    return private_copy(context, tensor)


def overwrite(tensor: Tensor, values: Tensor) -> Tensor:
    """Overwrite a user's tensor without autograd, and return it."""
    # A tensor created in inference mode can be written to only in inference mode.
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        plain(tensor).copy_(values)
    return tensor


def as_movable(plane: Plane, tensor: Tensor) -> tuple[Tensor, Restore]:
    """Return a tensor [*shape] in a dtype that the plane moves, and the inverse conversion."""
    if tensor.dtype in plane.dtypes:
        return tensor, _unchanged
    dtype = tensor.dtype
    # The last dimension holds the bytes of one element; the view shrinks that one to size 1.
    return as_bytes_tensor(tensor), lambda rows: rows.contiguous().view(dtype).squeeze(-1)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _emulate(tensor: Tensor, op: ReduceOp, size: int) -> tuple[Tensor, ReduceOp, Restore]:
    """Return a tensor and operation that emulate `op`, and the inverse conversion."""
    dtype = tensor.dtype
    if dtype.is_complex and op is ReduceOp.SUM:
        return torch.view_as_real(tensor), op, torch.view_as_complex
    if dtype.is_complex and op is ReduceOp.AVERAGE:
        parts, step, back = _emulate(torch.view_as_real(tensor), op, size)
        return parts, step, lambda total: torch.view_as_complex(back(total))
    # A uint64 whose highest bit is flipped has the order of int64.
    if dtype is torch.uint64 and op in (ReduceOp.MIN, ReduceOp.MAX):
        flipped = tensor.view(torch.int64) ^ _SIGN
        return flipped, op, lambda total: (total ^ _SIGN).view(torch.uint64)
    if not dtype.is_floating_point and not dtype.is_complex:  # cast back, int64 wraps as `dtype`
        return tensor.to(torch.int64), op, lambda total: total.to(dtype)  # bool, too
    if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize:
        # MIN, MAX and AVERAGE need another conversion even in float32.
        wide, step, back = _emulate(tensor.to(torch.float32), op, size)
        return wide, step, lambda total: back(total).to(dtype)
    if op is ReduceOp.AVERAGE:
        return _scaled(tensor, size)
    if is_order_of_floats(tensor, op):  # libraries treat NaN differently, integers alike
        keys, restore = as_ordered_ints(tensor, op)
        return keys, op, restore
    # SUM or PRODUCT as it is: the callers gather and fold what the plane can't reduce.
    return tensor, op, _unchanged


def _scaled(tensor: Tensor, size: int) -> tuple[Tensor, ReduceOp, Restore]:
    """Sum terms scaled by a power of two, so that no sum overflows unless the mean does."""
    # Scaling is exact except for numbers near the smallest of the dtype. In float16 these begin at
    # 6e-5, so `_emulate` has converted narrow floats to float32.
    before, after = mean_factors(size)
    if size > 1:  # else the factor is 1
        tensor.mul_(before)  # a private copy
    return tensor, ReduceOp.SUM, lambda total: total / after


def _prepare(
    context: ContextState,
    plane: Reducer,
    value: Tensor,
    op: ReduceOp,
    group: Group | None,
    *,
    is_ours: bool = False,
    is_read: bool = True,
) -> tuple[Tensor, ReduceOp, Restore]:
    """Return what `plane` reduces in place of `value`, by which operation, and the inverse."""
    # It is `value` itself only if that is ours, and its memory only if `is_read`. A conversion
    # overwrites a tensor, too.
    is_native = reduces_natively(plane, value, op)
    is_read = is_read and is_native
    tensor = value if is_ours else view_or_copy(context, value, plane, is_read=is_read)
    if is_native:
        return tensor, op, _unchanged
    size, dtype = context.model.topology.size(group), tensor.dtype
    if op is ReduceOp.AVERAGE and dtype is torch.bfloat16 and dtype in plane.dtypes:
        return _scaled(tensor, size)  # it has the range of float32: no wider dtype is needed
    return _emulate(tensor, op, size)


def all_gather(plane: Plane, tensor: Tensor, group: Group | None) -> Tensor:
    """Gather [*shape] to [n, *shape]. Collective over `group`."""
    movable, restore = as_movable(plane, tensor)
    return restore(plane.all_gather(movable, group))


def _gather_and_fold(plane: Plane, tensor: Tensor, op: ReduceOp, group: Group | None) -> Tensor:
    return fold_tensors(op, all_gather(plane, tensor.contiguous(), group))


def all_reduce(
    context: ContextState,
    value: Tensor,
    op: ReduceOp,
    group: Group | None,
    *,
    is_ours: bool = False,
) -> Tensor:
    """Reduce a tensor [*shape]; overwrite it only if `is_ours`. Collective over `group`."""
    # A tensor of ours is contiguous and on the transport device.
    value = value if is_ours else plain(value)
    plane, is_exchanged = reducer_for(context, value, group)
    tensor, step, restore = _prepare(context, plane, value, op, group, is_ours=is_ours)
    call = f"all_reduce {op.name}"  # not `step`: a mean and a sum may be converted to the same one
    if is_exchanged:
        parts = exchange_blobs(context, signature(call, value), to_bytes(tensor), group)
        total = fold_tensors(step, stack_bytes(parts, tensor.dtype, tensor.shape))
        return restore(total).to(value.device)
    compare_calls(context, call, value, group, plane)
    if tensor.dtype not in plane.dtypes:  # `plane` can't gather if it is memory in two levels
        total = _gather_and_fold(plane_for(context, group), tensor, step, group)
    elif type(plane) is HostCollectives and restore is _unchanged and not is_ours:  # only read
        total = plane.all_reduce(tensor, step, group, memory.new(tensor, tensor.shape))
    else:
        total = plane.all_reduce(tensor, step, group)
    return restore(total).to(value.device)


def start_all_reduce(
    context: ContextState, tensor: Tensor, op: ReduceOp, group: Group | None
) -> Handle[Tensor]:
    """Start `all_reduce` on a tensor that it may overwrite. Collective over `group`."""
    # The first call of a group waits for the other ranks as well: the background thread can wait.
    is_connected = context.control.is_connected(group)
    if not is_connected or reducer_for(context, tensor, group) != (context.model, False):
        with torch.inference_mode(False):  # the background thread isn't in it
            tensor = tensor.clone() if tensor.is_inference() else tensor
        call = partial(all_reduce, context, tensor, op, group, is_ours=True)
        return context.start(call, group)
    model = context.model
    converted, step, restore = _prepare(context, model, tensor, op, group, is_ours=True)

    def compare_and_fold() -> Tensor:
        compare_calls(context, f"all_reduce {op.name}", tensor, group)
        return _gather_and_fold(model, converted, step, group)

    def begin() -> Handle[Tensor]:
        compare_calls(context, f"all_reduce {op.name}", tensor, group)
        return context.start_all_reduce(converted, step, group)

    if converted.dtype not in model.dtypes:  # a gather and a fold, not one operation
        return context.start(compare_and_fold, group).then(restore)
    # Comparing calls waits for the other ranks; starting an operation must not.
    started = joined(context.start(begin, group)) if compares(context, group) else begin()
    return started.then(restore)


def reduce(
    context: ContextState, value: Tensor, dst: int, op: ReduceOp, group: Group | None
) -> Tensor | None:
    """Reduce a user's tensor to global rank `dst`. Collective over `group`."""
    value, plane = plain(value), plane_for(context, group)
    is_dst = context.model.topology.rank == dst
    # `dst` needs a copy, because the result overwrites its tensor.
    tensor, step, restore = _prepare(context, plane, value, op, group, is_read=not is_dst)
    compare_calls(context, f"reduce {op.name} to {dst}", value, group, plane)
    if tensor.dtype in plane.dtypes:
        total = plane.reduce(tensor, dst, step, group)
        return None if total is None else restore(total).to(value.device)
    total = _gather_and_fold(plane, tensor, step, group)
    return restore(total).to(value.device) if is_dst else None


def reduce_scatter(
    context: ContextState, value: Tensor, op: ReduceOp, group: Group | None
) -> Tensor:
    """Reduce a user's tensor [n*k, ...] and return this rank's part. Collective over `group`."""
    plane = plane_for(context, group)
    size = context.model.topology.size(group)
    rows = torch.unflatten(plain(value), 0, (size, value.shape[0] // size))
    tensor, step, restore = _prepare(context, plane, rows, op, group)
    compare_calls(context, f"reduce_scatter {op.name}", rows, group, plane)
    if tensor.dtype in plane.dtypes:
        return restore(plane.reduce_scatter(tensor, step, group)).to(value.device)
    total = _gather_and_fold(plane, tensor, step, group)
    return restore(total[context.model.topology.position(group)]).to(value.device)
