"""Sections: code that one rank runs alone, or first; an exception there reaches every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from typing_extensions import ParamSpec

from unisono.collectives.broadcasts import broadcast
from unisono.collectives.groups import local_group
from unisono.collectives.membership import check_rank
from unisono.collectives.outcomes import agreed
from unisono.context import ContextState, communicator, current
from unisono.errors import ArgumentError
from unisono.topology import Group

P = ParamSpec("P")
T = TypeVar("T")


def one_rank_only(
    rank: int = 0, with_barrier: bool = False
) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Decorate a function so that only one rank runs it.

    Collective over all ranks with a barrier, else local.

    Args:
        rank: global rank that runs it.
        with_barrier: whether all ranks wait until it has run, and raise if it failed.

    Returns:
        A decorator. The decorated function returns the function's value on `rank`, None elsewhere.

    Raises:
        ArgumentError: `rank` is not a rank of this job (on every rank, at the call).
        PeerFailedError: with a barrier, the function raised (on every rank; the original is the
            cause on `rank`).

    Example:
        >>> import unisono as idist
        >>> @idist.one_rank_only()
        ... def greet():
        ...     return "hello"
        >>> greet()
        'hello'
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(fn)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            # Without a barrier nothing is sent, so this needn't wait for other calls, unlike
            # `communicator`.
            context = current()
            check_rank(context, None, rank, "rank")
            is_chosen = context.model.topology.rank == rank
            if not with_barrier:
                return fn(*args, **kwargs) if is_chosen else None
            name = f"{fn.__qualname__} (one_rank_only)"
            with outcome_for_all(communicator(), None, rank, name):
                return fn(*args, **kwargs) if is_chosen else None

        return guarded

    return decorate


@contextmanager
def one_rank_first(rank: int = 0, local: bool = False) -> Iterator[None]:
    """Run a block on one rank before the others.

    Collective over all ranks, or over those of this node.

    Args:
        rank: global rank that runs it first; with `local`, a local rank.
        local: whether one rank of each node runs it first.

    Yields:
        None.

    Raises:
        ArgumentError: `rank` is not a rank of this job (on every rank).
        PeerFailedError: the block raised on the first rank (on every rank, before the others have
            run it; the original is the cause on that rank).

    Example:
        >>> import unisono as idist
        >>> with idist.one_rank_first():
        ...     data = "downloaded"
    """
    context = communicator()
    group = local_group() if local else None
    if local:
        ranks = context.model.topology.members(group)
        if type(rank) is not int or not 0 <= rank < len(ranks):
            raise ArgumentError(f"rank={rank!r} should be a local rank from 0 to {len(ranks) - 1}")
        rank = ranks[rank]
    else:
        check_rank(context, None, rank, "rank")
    is_first = context.model.topology.rank == rank
    with outcome_for_all(context, group, rank, "one_rank_first"):
        if is_first:
            yield
    if not is_first:
        yield  # outside the section, whose outcome is that of the first rank's block alone


@contextmanager
def outcome_for_all(
    context: ContextState, group: Group | None, rank: int, name: str, refusal: str | None = None
) -> Iterator[None]:
    """Run the body, and raise on every rank if it failed on `rank`."""
    error: BaseException | None = None
    try:
        yield
    except GeneratorExit:  # the block was abandoned; a garbage collection must run no collective
        raise
    except BaseException as raised:  # of any kind, because other ranks must not wait forever
        error = raised
    agreed(context, name, error, group=group, call=f"{name} of rank {rank}", refusal=refusal)


def master_only(fn: Callable[P, T]) -> Callable[P, T | None]:
    """Decorate a function so that only rank 0 runs it.

    Args:
        fn: any function.

    Returns:
        A function that returns its value on rank 0 and None elsewhere.

    Example:
        >>> import unisono as idist
        >>> @idist.master_only
        ... def save():
        ...     return "saved"
        >>> save()
        'saved'
    """
    return one_rank_only(rank=0)(fn)


def run_on_rank(fn: Callable[[], T], rank: int = 0) -> T:
    """Run a function on one rank and return its value on all.

    Collective over all ranks.

    Args:
        fn: called without arguments, only on `rank`; returns anything that `broadcast` takes.
        rank: global rank that runs it.

    Returns:
        Its value, on every rank.

    Raises:
        ArgumentError: `rank` is not a rank of this job (on every rank).
        PeerFailedError: the function raised (on every rank; the original is the cause on `rank`).
        PayloadError: its value can't be sent (on every rank).

    Example:
        >>> import unisono as idist
        >>> idist.run_on_rank(lambda: "read once")
        'read once'
    """
    context = communicator()
    check_rank(context, None, rank, "rank")
    value: Any = None
    name = f"{getattr(fn, '__qualname__', type(fn).__qualname__)} (run_on_rank)"
    with outcome_for_all(context, None, rank, name):
        if context.model.topology.rank == rank:
            value = fn()
    # Only after the outcome, because a rank that failed has no value to send.
    result: T = broadcast(value, rank)
    return result
