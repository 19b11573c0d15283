"""Memory use, and search for the largest batch size that fits on every rank."""

from __future__ import annotations

import functools
import gc
import math
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, TypeVar

import psutil
import torch
from typing_extensions import ParamSpec

from unisono.accelerators import accelerator
from unisono.arguments import check_count
from unisono.collectives.outcomes import agreed, exchange
from unisono.context import communicator, current_model
from unisono.errors import CollectiveMismatchError, PeerFailedError, UnisonoError

P = ParamSpec("P")
T = TypeVar("T")
_GIB = 2**30
_NAME = "find_executable_batch_size"
# Texts in RuntimeErrors of the host, cuBLAS, cuDNN and XLA. CUDNN_STATUS_NOT_SUPPORTED has other
# causes, too, but can mean a lack of memory.
_TEXTS = (
    "out of memory",
    "can't allocate memory",
    "ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "RESOURCE_EXHAUSTED",
)


def find_executable_batch_size(
    starting_batch_size: int = 128,
) -> Callable[[Callable[Concatenate[int, P], T]], Callable[P, T]]:
    """Decorate a function so that it gets the largest batch size that fits on every rank.

    Collective over all ranks, at each call. The function begins with `starting_batch_size`. If any
    rank is out of memory, all ranks retry with half of it. Create the model, the optimizer and the
    loader within the function, so that they are freed between tries.

    If a rank runs out of memory while others wait for it in a collective, these notice it where
    ranks compare calls: in the facade's collectives, and in backward under `Replicated`. In
    backward under ``DistributedDataParallel``, and on accelerators, they wait until the deadline;
    let the function run a step in `no_sync` there, and return its batch size.

    Args:
        starting_batch_size: the first batch size to try, the same on every rank.

    Returns:
        A decorator. The function's first argument is the batch size, which callers leave out.

    Raises:
        ArgumentError: `starting_batch_size` isn't an int of at least 1.
        CollectiveMismatchError: `starting_batch_size` differs between ranks; the message shows each
            rank's value (at the call, on every rank).
        MemoryError: even a batch of 1 doesn't fit (at the call, on every rank).
        PeerFailedError: the function raised another error on another rank (at the call).

    Example:
        >>> import unisono as idist
        >>> @idist.find_executable_batch_size(64)
        ... def train(batch_size):
        ...     if batch_size > 20:
        ...         raise MemoryError
        ...     return batch_size
        >>> train()
        16
    """
    begin = check_count("starting_batch_size", starting_batch_size)

    def decorate(fn: Callable[Concatenate[int, P], T]) -> Callable[P, T]:
        @functools.wraps(fn)
        def search(*args: P.args, **kwargs: P.kwargs) -> T:
            size = begin
            context = communicator()
            # Ranks compare the first size here, as `_try` ignores any number of mismatches.
            with context.calls.begin(_NAME):
                exchange(context, f"{_NAME} from {size}", None)
            while size:
                # The lambda is called before `size` changes.
                has_room, value = _try(lambda: fn(size, *args, **kwargs), size)  # noqa: B023
                if has_room:
                    return value
                _free()
                size //= 2
            raise MemoryError(f"{fn.__qualname__} is out of memory with a batch of 1")

        return search

    return decorate


def _try(call: Callable[[], T], size: int) -> tuple[bool, T]:
    """Return whether all ranks had enough memory, and the result. Collective over all ranks."""
    value: Any = None
    error: Exception | None = None
    has_room = True
    try:
        value = call()
    except Exception as raised:
        has_room = not _is_out_of_memory(raised)
        error = raised if has_room else None  # a reference would keep the objects of its frames
    context = communicator()
    with context.calls.begin(_NAME):
        # A rank out of memory calls this while others are in collectives of the function. Each of
        # these fails with a mismatch, which counts as a miss, until all ranks have called this.
        replies = exchange(context, f"{_NAME}: {size}", has_room, misses=math.inf)
    if not all(replies):
        # A background thread that raised the error may still hold it, and thus its frames' tensors.
        if error is not None:
            traceback.clear_frames(error.__traceback__)
        return False, None  # type: ignore[return-value]
    try:
        agreed(context, f"a function with batch size {size}", error)
    except PeerFailedError as failed:
        # A rank with an error raises it below, unless the error is a mismatch that another rank's
        # failure has caused.
        is_this_rank = failed.rank == context.model.topology.rank
        if error is None or (isinstance(error, CollectiveMismatchError) and not is_this_rank):
            raise
    if error is not None:
        raise error
    return True, value


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means that the host or a device is out of memory."""
    # Another rank has left the function, maybe for lack of memory; this one hasn't run out of it.
    if isinstance(error, CollectiveMismatchError):
        return False
    while isinstance(error, UnisonoError):  # such as evaluate's error, whose cause is the original
        error = error.__cause__
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _free() -> None:
    """Collect garbage, and empty the accelerator's cache."""
    gc.collect()
    kind = accelerator()
    if kind is not None:
        module: Any = torch.get_device_module(kind)
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def get_current_memory_gb() -> float:
    """Measure the host memory that only this process uses.

    Returns:
        In GiB, the process's unique set size, or its resident set size where the system doesn't
        report the unique one.

    Example:
        >>> import unisono as idist
        >>> 0 < idist.get_current_memory_gb() < 1000
        True
    """
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
        GiB; 0.0 on a CPU, and on devices whose memory use torch doesn't report.

    Example:
        >>> import unisono as idist
        >>> idist.get_device_memory_gb() >= 0
        True
    """
    device = current_model().device
    name = "max_memory_allocated" if peak else "memory_allocated"
    # until torch 2.9 torch.accelerator doesn't have it, but the device's own module does
    measure: Any = getattr(torch.accelerator, name, None)
    measure = measure or getattr(getattr(torch, device.type, None), name, None)
    if device.type == "cpu" or measure is None:
        return 0.0
    return float(measure(device) / _GIB)
