"""Rank-aware printing and logging, reductions of values, and memory use."""

from __future__ import annotations

import builtins
import importlib
import io
import logging
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, TextIO, TypeVar, overload

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from unisono.arguments import check_count
from unisono.collectives.call import swap
from unisono.collectives.reductions import (
    Container,
    Inexact,
    NumpyScalar,
    Summed,
    all_reduce,
)
from unisono.context import communicator, current_model
from unisono.errors import PayloadError
from unisono.launchers.job.output import RankStream
from unisono.model.reduction import FoldLike, OpLike, ReduceOp, parse_op
from unisono.payload.pytree import flatten, unflatten
from unisono.payload.tensors import is_dense
from unisono.topology import PREFIXED
from unisono.training.same_tensors import is_sharded

Meant = TypeVar("Meant", Tensor, float, complex, float | Tensor)
_GIB = 2**30


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
        The sum, of the same type, dtype and device, on every rank; of bools their number, as an int
        or an int64 tensor.

    Raises:
        PayloadError: it can't be reduced, or a sum of integers of fewer than 64 bits doesn't fit
            into their type (on every rank).
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
        The mean on every rank; of integers and bools a float, or a float32 tensor.

    Raises:
        ArgumentError: `nprocs` isn't an int of at least 1.
        PayloadError: it can't be reduced (on every rank).
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
    reduced = _reduced({key: values[key] for key in sorted(values)}, operation)
    return {key: reduced[key] for key in values}


def _reduced(value: Any, op: ReduceOp) -> Any:
    """Reduce a value; sum and average integers and half floats in wider types."""
    try:
        leaves, paths = flatten(value)
    except Exception:  # raised by the value's class; all_reduce reports it on every rank
        return all_reduce(value, op)
    leaves = _whole(leaves, paths)
    if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        try:
            sent = [_widened(leaf, op) for leaf in leaves]
        except Exception:  # as above
            return all_reduce(value, op)
        totals, _ = flatten(all_reduce(unflatten(value, sent), op))
        leaves = [_narrowed(total, leaf, op) for total, leaf in zip(totals, leaves, strict=True)]
        return unflatten(value, leaves)
    return all_reduce(unflatten(value, leaves), op)


def _whole(leaves: list[Any], paths: list[str]) -> list[Any]:
    """Gather DTensors, which must be at the same paths on all ranks, into full tensors."""
    sharded = [path for leaf, path in zip(leaves, paths, strict=True) if is_sharded(leaf)]
    if not sharded:
        return leaves
    swap(communicator(), f"a reduction of DTensors at {', '.join(sharded)}", b"", None)
    return [leaf.full_tensor() if is_sharded(leaf) else leaf for leaf in leaves]


def _is_whole(value: Any) -> bool:
    return is_dense(value) and not (value.is_floating_point() or value.is_complex())


def _is_half(value: Any) -> bool:
    return is_dense(value) and value.is_floating_point() and value.itemsize < torch.float32.itemsize


def _widened(value: Any, op: ReduceOp) -> Any:
    """Convert a value to the type that its sum is computed in."""
    if type(value) is bool:
        return int(value)
    if _is_half(value):
        return value.to(torch.float32)
    if not _is_whole(value):
        return value
    if op is ReduceOp.AVERAGE:
        return value.cpu().to(torch.float64)  # some accelerators have no float64
    return value if value.dtype is torch.uint64 else value.to(torch.int64)


def _narrowed(total: Any, like: Any, op: ReduceOp) -> Any:
    """Convert a result to the type and device for a value like `like`; raise if it overflows."""
    if _is_half(like):
        return total.to(like.dtype)
    if not _is_whole(like):
        return total
    if op is ReduceOp.AVERAGE:
        return total.to(torch.float32).to(like.device)
    if like.dtype in (torch.bool, torch.int64, torch.uint64):
        return total
    limits = torch.iinfo(like.dtype)
    if bool(((total < limits.min) | (total > limits.max)).any()):
        raise PayloadError(
            f"a sum of {like.dtype}{list(like.shape)} over all ranks doesn't fit into it: convert "
            "it to a wider type, or to a float"
        )
    return total.to(like.dtype)


def get_current_memory_gb() -> float:
    """Measure the host memory that only this process uses.

    Returns:
        GiB: the process's unique set size, or its resident set size where the system doesn't
        report that.

    Example:
        >>> import unisono as idist
        >>> 0 < idist.get_current_memory_gb() < 1000
        True
    """
    psutil: Any = importlib.import_module("psutil")
    process = psutil.Process()
    try:
        used = process.memory_full_info().uss
    except (psutil.Error, AttributeError):
        used = process.memory_info().rss
    return float(used / _GIB)


def get_device_memory_gb(peak: bool = False) -> float:
    """Measure the device memory that torch's tensors use.

    Args:
        peak: whether to return the maximum so far.

    Returns:
        GiB; 0.0 on a CPU, and where this torch doesn't report it.

    Example:
        >>> import unisono as idist
        >>> idist.get_device_memory_gb() >= 0
        True
    """
    device = current_model().device
    name = "max_memory_allocated" if peak else "memory_allocated"
    # until torch 2.9 torch.accelerator doesn't have it, but the device's own module does
    ask: Any = getattr(torch.accelerator, name, None)
    ask = ask or getattr(getattr(torch, device.type, None), name, None)
    if device.type == "cpu" or ask is None:
        return 0.0
    return float(ask(device) / _GIB)


class _PrintOptions(TypedDict, total=False):
    sep: str | None
    end: str | None
    file: TextIO | None
    flush: bool


def print(*args: Any, all: bool = False, **kwargs: Unpack[_PrintOptions]) -> None:
    """Print once on each node, or on every rank with its number.

    Args:
        args: as the built-in's.
        all: whether every rank prints; else the one with local rank 0 does.
        kwargs: ``sep``, ``end``, ``file`` and ``flush``, as the built-in's. With several replicas
            each line begins with ``[rank N]``, unless a pool or ``unisono run`` adds the
            rank, and is written in one call.

    Example:
        >>> import unisono as idist
        >>> idist.print("loss", 0.5, sep=": ")
        loss: 0.5
    """
    options: dict[str, Any] = {**kwargs}
    topology = current_model().topology
    local_rank = topology.rank if topology.local_rank is None else topology.local_rank
    if not all and local_rank != 0:
        return
    file = options.pop("file", None)
    flush = options.pop("flush", False)
    text = io.StringIO()
    builtins.print(*args, file=text, **options)
    out: TextIO | None = sys.stdout if file is None else file
    if out is None:
        return
    is_passed_on = out in (sys.stdout, sys.stderr) and os.environ.get(PREFIXED)
    is_marked = isinstance(out, RankStream) or is_passed_on == str(topology.rank)
    mark = f"[rank {topology.rank}] " if topology.world_size > 1 and not is_marked else ""
    out.write(mark + text.getvalue())
    if flush:
        out.flush()


class RankFilter(logging.Filter):
    """Filters records by rank, and sets ``rank`` and ``world_size`` on each.

    Args:
        ranks: global ranks that may log; None for all.
        level: records of at least this level pass on every rank.
    """

    def __init__(
        self, ranks: Collection[int] | None = (0,), level: int = logging.CRITICAL + 1
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        topology = current_model().topology
        record.rank, record.world_size = topology.rank, topology.world_size
        is_chosen = self._ranks is None or topology.rank in self._ranks
        return is_chosen or record.levelno >= self._level


class RankFormatter(logging.Formatter):
    """A formatter with the fields ``%(rank)s``, ``%(world_size)s`` and ``%(local_rank)s``.

    Args:
        fmt: as ``logging.Formatter``'s; the default begins with ``[rank N/M]``.
        datefmt: as ``logging.Formatter``'s.
    """

    def __init__(self, fmt: str | None = None, datefmt: str | None = None) -> None:
        line = "[rank %(rank)s/%(world_size)s] %(asctime)s %(name)s %(levelname)s: %(message)s"
        super().__init__(line if fmt is None else fmt, datefmt)

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record."""
        topology = current_model().topology
        record.rank, record.world_size = topology.rank, topology.world_size
        record.local_rank = topology.local_rank
        return super().format(record)
