"""Bad input to a collective raises the same clear error on every rank, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

import unisono as idist
from tests.support.worlds import with_marks
from unisono.errors import (
    AlreadyInitializedError,
    ArgumentError,
    GroupMembershipError,
    PayloadError,
)
from unisono.testing.pytest_plugin.body import World

everywhere = with_marks(pytest.mark.ranks(1, on="serial"), pytest.mark.ranks(2))
Refusal = tuple[Callable[[], Any], Sequence[str]]


def are_refused(world: World, error: type[Exception], refusals: Sequence[Refusal]) -> None:
    """Check the error and the words of each call, and after each that the context still works."""
    for call, words in refusals:
        with pytest.raises(error) as caught:
            call()
        assert caught.type is error
        for word in words:
            assert word in str(caught.value)
        assert idist.all_reduce(1) == world.size, words


def first(rank: Any) -> None:
    with idist.one_rank_first(rank):
        pass


NO_RANKS: tuple[Any, ...] = (7, -1, True, "0", 0.0, None)
GROUPS: tuple[tuple[Any, str], ...] = (
    ([0, 0], "[0, 0]: duplicate ranks"),
    ([0, 9], "9 is not a rank of this job"),
    ([-1], "-1 is not a rank of this job"),
    ([False], "False is not a rank of this job"),
    (["0"], "'0' is not a rank of this job"),
    (0, "group"),
    ("0", "group"),
)


@everywhere
def test_ranks_groups_operations_and_a_second_context(world: World) -> None:
    ones = [1] * world.size
    takers: list[tuple[str, Callable[[Any], Any]]] = [
        ("src", lambda rank: idist.broadcast(1, src=rank)),
        ("src", lambda rank: idist.broadcast_(torch.ones(1), src=rank)),
        ("src", lambda rank: idist.scatter(ones, src=rank)),
        ("dst", lambda rank: idist.reduce(1, dst=rank)),
        ("dst", lambda rank: idist.gather(1, dst=rank)),
        ("dst", lambda rank: idist.send(1, dst=rank)),
        ("src", lambda rank: idist.recv(src=rank)),
        ("rank", lambda rank: idist.one_rank_only(rank=rank)(int)()),
        ("rank", first),
    ]
    scope = f"from 0 to {world.size - 1}"
    wrong: list[Refusal] = [
        (partial(call, rank), (f"{name}={rank!r}", scope))
        for name, call in takers
        for rank in NO_RANKS
    ]
    for ranks, words in GROUPS:
        wrong.append((partial(idist.all_reduce, 1, group=ranks), (words,)))
        wrong.append((partial(idist.new_group, ranks), ("ranks",)))
    known, bad, nothing = ("unknown reduction", "SUM AVERAGE"), "NOPE", None
    wrong += [
        (lambda: idist.all_reduce(1, bad), ("'NOPE'", *known)),  # type: ignore[call-overload]
        (lambda: idist.all_reduce_(torch.ones(1), bad), ("'NOPE'", *known)),  # type: ignore[call-overload]
        (lambda: idist.reduce(1, op=nothing), ("None", *known)),  # type: ignore[call-overload]
    ]
    are_refused(world, ArgumentError, wrong)
    live = (f"live already (rank {world.rank} of", "call finalize() first")
    are_refused(world, AlreadyInitializedError, [(lambda: idist.initialize("gloo"), live)])
    if world.size > 1:
        outside = ("src=0 isn't a member of the group (1,)",)
        root = partial(idist.broadcast, 1, src=0, group=[1])
        are_refused(world, GroupMembershipError, [(root, outside)])


@everywhere
def test_values_of_the_last_rank(world: World) -> None:
    last, ones = world.size - 1, [1] * world.size
    lock = threading.Lock()
    locks = [lock] * world.size

    def mine(bad: Any, good: Any = 1) -> Any:
        return bad if world.rank == last else good

    of_last = f"rank {last}: "
    stuck = (of_last, "can't be pickled: TypeError: cannot pickle '_thread.lock'")
    too_large = "9223372036854775808 doesn't fit into 64 bits"
    calls: list[Refusal] = [
        (lambda: idist.all_reduce(torch.ones(1), "AND"), ("AND works on integer",)),
        (lambda: idist.all_gather(2**63), (too_large,)),
        (lambda: idist.all_reduce(mine(2**63)), (of_last, too_large)),
        (lambda: idist.broadcast(2**63, src=last), (of_last, too_large)),
        (lambda: idist.all_gather(mine(lock)), stuck),
        (lambda: idist.broadcast(lock, src=last), stuck),
        (lambda: idist.gather({"a": mine(lock)}), stuck),
        (lambda: idist.scatter(locks, src=last), stuck),
        (lambda: idist.all_to_all(mine(locks, ones)), stuck),
        (lambda: idist.all_reduce(mine("x")), (of_last, "a str can't be")),
        (
            lambda: idist.all_reduce({"a": 1, "b": [mine("x")]}),
            (of_last, "a str at {'b'}[0] can't be"),
        ),
        (lambda: idist.scatter([1] * (last + 2), src=last), (of_last, "one for each")),
        (lambda: idist.all_to_all([1] * (last + 2)), ("a list of",)),
        (lambda: idist.reduce_scatter(torch.tensor(1)), ("dim 0 is a multiple of",)),
    ]
    are_refused(world, PayloadError, calls)
