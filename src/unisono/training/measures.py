"""Numbers of all ranks as one, and how much memory there is in use."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from unisono._arguments import check_count
from unisono._context import current_model
from unisono.collectives.reductions import all_reduce

__all__ = (
    "get_current_memory_gb",
    "get_device_memory_gb",
    "reduce_dict",
    "reduce_mean",
    "reduce_sum",
)

_GIB = 2**30


def reduce_sum(value: Any) -> Any:
    """Add up a value of all ranks.

    Collective over all ranks.

    Args:
        value: a tensor on any device, or a number; it isn't changed.

    Returns:
        The sum, of the same type, dtype and device, on every rank.

    Raises:
        PayloadError: it can't be reduced.
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> idist.reduce_sum(2)
        2
    """
    return all_reduce(value, "SUM")


def reduce_mean(value: Any, nprocs: int | None = None) -> Any:
    """Give the mean of a value of all ranks.

    Collective over all ranks.

    Args:
        value: a tensor on any device, or a number; it isn't changed.
        nprocs: what the sum is divided by; None for the number of ranks.

    Returns:
        The mean on every rank; of integers a float, or a float32 tensor.

    Raises:
        ArgumentError: `nprocs` is no int of at least 1.
        PayloadError: it can't be reduced.
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> idist.reduce_mean(3)
        3.0
    """
    if nprocs is not None:
        check_count("nprocs", nprocs)
    size = current_model().topology.world_size if nprocs is None else nprocs
    return all_reduce(value, "SUM") / size


def reduce_dict(values: dict[str, Any], op: str = "mean") -> dict[str, Any]:
    """Reduce a dict of numbers and tensors in one go, such as the losses of a step.

    Collective over all ranks.

    Args:
        values: the same keys on every rank, in any order; tensors of the same shapes.
        op: as in `all_reduce`; the mean of integer tensors is a float32 tensor.

    Returns:
        A new dict in the order of `values`, the same on every rank.

    Raises:
        CollectiveMismatchError: the keys differ between ranks (on every rank).
        PayloadError: a value can't be reduced (on every rank).
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import unisono as idist
        >>> idist.reduce_dict({"loss": 0.5, "accuracy": 0.25})
        {'loss': 0.5, 'accuracy': 0.25}
    """
    is_mean = op.upper() in ("MEAN", "AVERAGE")
    ordered = {key: values[key] for key in sorted(values)}
    if is_mean:
        ordered = {key: _inexact(value) for key, value in ordered.items()}
    reduced: dict[str, Any] = all_reduce(ordered, op)
    return {key: reduced[key] for key in values}


def _inexact(value: Any) -> Any:
    is_whole = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.to(torch.float32) if is_whole else value


def get_current_memory_gb() -> float:
    """Tell how much memory of the host this process alone uses.

    Local.

    Returns:
        GiB that would be free if it ended: its unique set size, or its resident set where the
        system doesn't tell that.

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
    """Tell how much memory of this replica's device torch's tensors use.

    Local.

    Args:
        peak: whether the most that was in use is meant.

    Returns:
        GiB; 0.0 on a CPU, and where this torch doesn't tell.

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
