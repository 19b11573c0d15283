"""Sums, means and other reductions of numbers, tensors and containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from unisono.arguments import check_count
from unisono.collectives.call import exchange_blobs
from unisono.collectives.reductions import (
    Container,
    Inexact,
    NumpyScalar,
    Summed,
    all_reduce,
)
from unisono.context import communicator, current_model
from unisono.errors import PayloadError
from unisono.model.reduction import FoldLike, OpLike, ReduceOp, parse_op
from unisono.payload.pytree import flatten, unflatten
from unisono.payload.tensors import is_dense
from unisono.training.same_tensors import is_integer, is_sharded

Meant = TypeVar("Meant", Tensor, float, complex, float | Tensor)


@overload
def reduce_sum(value: Summed) -> Summed: ...


@overload
def reduce_sum(value: NumpyScalar | Container) -> Any: ...


def reduce_sum(value: Any) -> Any:
    """Sum a value over all ranks.

    Collective over all ranks.

    Args:
        value: a number, a tensor on any device, or a container of these; it isn't changed.

    Returns:
        The sum on every rank, of the same type, dtype and device as `value`; for bools, the number
        of true ones, as an int or an int64 tensor.

    Raises:
        PayloadError: `value` can't be reduced, or a sum of integers of fewer than 64 bits doesn't
            fit into their type (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.reduce_sum(2)
        2
    """
    return _reduced(value, ReduceOp.SUM)


@overload
def reduce_mean(value: Inexact, nprocs: int | None = None) -> Inexact: ...


@overload
def reduce_mean(value: NumpyScalar | Container, nprocs: int | None = None) -> Any: ...


def reduce_mean(value: Any, nprocs: int | None = None) -> Any:
    """Return the mean of a value over all ranks.

    Collective over all ranks.

    Args:
        value: a number, a tensor on any device, or a container of these; it isn't changed.
        nprocs: divisor of the sum; None for the number of ranks.

    Returns:
        The mean on every rank; for integers and bools, a float or a float32 tensor.

    Raises:
        ArgumentError: `nprocs` isn't an int of at least 1.
        PayloadError: `value` can't be reduced (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.reduce_mean(3)
        3.0
    """
    if nprocs is not None:
        check_count("nprocs", nprocs)
    mean = _reduced(value, ReduceOp.AVERAGE)
    size = current_model().topology.world_size
    if nprocs in (None, size):
        return mean
    leaves, _ = flatten(mean)
    return unflatten(mean, [leaf * size / nprocs for leaf in leaves])


@overload
def reduce_dict(values: Mapping[str, Summed], op: FoldLike) -> dict[str, Summed]: ...


@overload
def reduce_dict(values: Mapping[str, Meant], op: OpLike = "mean") -> dict[str, Meant]: ...


@overload
def reduce_dict(values: Mapping[str, Any], op: OpLike = "mean") -> dict[str, Any]: ...


def reduce_dict(values: Mapping[str, Any], op: OpLike = "mean") -> dict[str, Any]:
    """Reduce a dict of numbers and tensors in one call, such as the losses of a step.

    Collective over all ranks.

    Args:
        values: the same keys on every rank, in any order; tensors of the same shapes. A DTensor
            counts as its full tensor.
        op: as in `all_reduce`; sums and means are those of `reduce_sum` and `reduce_mean`.

    Returns:
        A new dict in the order of `values`, the same on every rank.

    Raises:
        CollectiveMismatchError: the keys differ between ranks (on every rank).
        PayloadError: a value can't be reduced, or a sum of integers of fewer than 64 bits doesn't
            fit into their type (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import unisono as idist
        >>> idist.reduce_dict({"loss": 0.5, "accuracy": 0.25})
        {'loss': 0.5, 'accuracy': 0.25}
    """
    operation = parse_op(op)
    # Sorted, as the ranks may have the keys in different orders.
    reduced = _reduced({key: values[key] for key in sorted(values)}, operation)
    return {key: reduced[key] for key in values}


def _reduced(value: Any, op: ReduceOp) -> Any:
    """Reduce a value; sum and average integers and half floats in wider types."""
    try:
        leaves, paths = flatten(value)
    except Exception:  # raised by the value's class; all_reduce reports it on every rank
        return all_reduce(value, op)
    leaves = _with_full_tensors(leaves, paths)
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return all_reduce(unflatten(value, leaves), op)
    try:
        sent = [_widened(leaf, op) for leaf in leaves]
    except Exception:  # also raised by the value's class
        return all_reduce(value, op)
    totals, _ = flatten(all_reduce(unflatten(value, sent), op))
    rows = zip(totals, leaves, strict=True)
    return unflatten(value, [_narrowed(total, leaf, op) for total, leaf in rows])


def _with_full_tensors(leaves: list[Any], paths: list[str]) -> list[Any]:
    """Gather DTensors, which must be at the same paths on all ranks, into full tensors."""
    sharded = [path for leaf, path in zip(leaves, paths, strict=True) if is_sharded(leaf)]
    if not sharded:
        return leaves
    # Ranks compare the paths, since full_tensor() would hang if other ranks had no DTensors there.
    exchange_blobs(communicator(), f"a reduction of DTensors at {', '.join(sharded)}", b"", None)
    return [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]


def _is_half(value: Any) -> bool:
    return is_dense(value) and value.is_floating_point() and value.itemsize < torch.float32.itemsize


def _widened(value: Any, op: ReduceOp) -> Any:
    """Convert a value to the type that its sum is computed in."""
    if type(value) is bool:
        return int(value)
    if _is_half(value):
        return value.to(torch.float32)
    if not is_integer(value):
        return value
    if op is ReduceOp.AVERAGE:
        return value.cpu().to(torch.float64)  # some accelerators have no float64
    return value if value.dtype is torch.uint64 else value.to(torch.int64)


def _narrowed(total: Any, like: Any, op: ReduceOp) -> Any:
    """Convert a result to the type and device of the value `like`; raise if it overflows."""
    if _is_half(like):
        return total.to(like.dtype)
    if not is_integer(like):
        return total
    if op is ReduceOp.AVERAGE:
        return total.to(torch.float32).to(like.device)
    # These sums stay as they are: int64 and uint64 weren't widened, and bools are counted in int64.
    if like.dtype in (torch.bool, torch.int64, torch.uint64):
        return total
    limits = torch.iinfo(like.dtype)
    if bool(((total < limits.min) | (total > limits.max)).any()):
        raise PayloadError(
            f"a sum of {like.dtype}{list(like.shape)} over all ranks doesn't fit into that dtype: "
            "convert it to a wider type, or to a float"
        )
    return total.to(like.dtype)
