"""The largest batch size that fits into the memory of every rank."""

from __future__ import annotations

import functools
import gc
import math
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, Literal, TypeVar

import torch
from typing_extensions import ParamSpec

from unisono.accelerators import accelerator
from unisono.arguments import check_count
from unisono.collectives.outcomes import Report, exchange, failure, report
from unisono.context import communicator
from unisono.errors import CollectiveMismatchError, UnisonoError

P = ParamSpec("P")
T = TypeVar("T")
Ending = Literal["done", "out of memory", "failed", "out of step"]
_NAME = "find_executable_batch_size"
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

    Collective over all ranks, at each call. The function begins with `starting_batch_size`. If some
    rank is out of memory, all of them begin again with half of it. So make in it what is to be
    freed between: model, optimizer, loader.

    A rank that is out of memory while others wait for it in a collective is noticed where ranks
    compare calls: in those of the facade, and in backward under `Replicated`. In backward under
    ``DistributedDataParallel``, and on accelerators, they wait until the deadline: there, let the
    function try a step in `no_sync` and return its batch size.

    Args:
        starting_batch_size: the first one, the same on every rank.

    Returns:
        A decorator. The function's first argument is the batch size, which callers leave out.

    Raises:
        ArgumentError: `starting_batch_size` isn't an int of at least 1.
        CollectiveMismatchError: `starting_batch_size` differs between ranks; names each rank's (at
            the call, on every rank).
        MemoryError: a batch of 1 doesn't fit either (at the call, on every rank).
        PeerFailedError: the function raised something else on another rank (at the call).

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
            with context.calls.call(_NAME):
                exchange(context, f"{_NAME} from {size}", None)
            while size:
                ending, value = _try(lambda: fn(size, *args, **kwargs), size)  # noqa: B023
                if ending == "done":
                    return value
                _free()
                size //= 2
            raise MemoryError(f"{fn.__qualname__} is out of memory with a batch of 1")

        return search

    return decorate


def _try(call: Callable[[], T], size: int) -> tuple[Ending, T]:
    """Call something, and learn how it ended on all ranks. Collective over all ranks."""
    ending: Ending = "done"
    value: Any = None
    error: Exception | None = None
    reported: Report | None = None
    try:
        value = call()
    except Exception as raised:
        ending = _ending(raised)
        if ending != "out of memory":  # then nothing may keep what the function's frames hold
            error, reported = raised, report(raised)
    context = communicator()
    with context.calls.call(_NAME):
        replies = exchange(context, f"{_NAME}: {size}", (ending, reported), misses=math.inf)
    endings = [reply[0] for reply in replies]
    if "out of memory" in endings:
        if error is not None:  # the thread that raised it may hold it still, and so its frames
            traceback.clear_frames(error.__traceback__)
        value = None  # the next try needs its room
        return "out of memory", value
    for worst in ("failed", "out of step"):
        if error is not None and ending == worst:
            raise error
        if worst in endings:
            rank = endings.index(worst)
            raise failure(rank, f"a function with batch size {size}", replies[rank][1]) from error
    return "done", value


def _ending(error: Exception) -> Ending:
    if isinstance(error, CollectiveMismatchError):
        return "out of step"
    cause: BaseException | None = error
    while isinstance(cause, UnisonoError):  # as that of evaluate, which has the original below
        cause = cause.__cause__
    if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
        return "out of memory"
    is_told = isinstance(cause, RuntimeError) and any(text in str(cause) for text in _TEXTS)
    return "out of memory" if is_told else "failed"


def _free() -> None:
    """Give back what caches hold."""
    gc.collect()
    kind = accelerator()
    if kind is not None:
        module: Any = torch.get_device_module(kind)
        empty = getattr(module, "empty_cache", None)
        if empty is not None:
            empty()
