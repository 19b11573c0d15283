"""What users get wrong in a collective: each of these must raise on every rank alike."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import unisono as idist
from unisono.errors import ArgumentError, GroupMembershipError, PayloadError

__all__ = ("MISTAKES", "Mistake", "make_all")


@dataclass(frozen=True)
class Mistake:
    """One call, the error that it must raise, and words that its message must have.

    In `words`, ``{last}`` is the last rank, the only one to do wrong in some calls, and ``{rank}``
    the one that reads the message.
    """

    call: Callable[[], Any]
    error: type[Exception]
    words: tuple[str, ...]
    least_size: int = 1


def is_last() -> bool:
    return idist.get_rank() == last()


def last() -> int:
    return idist.get_world_size() - 1


def many(value: Any) -> list[Any]:
    return [value] * idist.get_world_size()


def sole(rank: int) -> None:
    idist.one_rank_only(rank=rank)(int)()


def first(rank: int) -> None:
    with idist.one_rank_first(rank):
        pass


LOCK = "a lock can't be pickled"
RANKS = ("from 0 to {last}",)
_ROOTS: dict[str, Callable[[Any], Any]] = {
    "broadcast src": lambda rank: idist.broadcast(1, src=rank),
    "broadcast_ src": lambda rank: idist.broadcast_(torch.ones(1), src=rank),
    "scatter src": lambda rank: idist.scatter(many(1), src=rank),
    "reduce dst": lambda rank: idist.reduce(1, dst=rank),
    "gather dst": lambda rank: idist.gather(1, dst=rank),
    "send dst": lambda rank: idist.send(1, dst=rank),
    "recv src": lambda rank: idist.recv(src=rank),
    "one_rank_only rank": sole,
    "one_rank_first rank": first,
}
_NO_RANKS: tuple[Any, ...] = (7, -1, True, "0", 0.0, None)
_GROUPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "twice": ([0, 0], ("[0, 0]", "duplicate ranks")),
    "strangers": ([0, 9], ("9 is not a rank of this job", *RANKS)),
    "negative": ([-1], ("-1 is not a rank of this job",)),
    "bools": ([False], ("False is not a rank of this job",)),
    "texts": (["0"], ("'0' is not a rank of this job",)),
    "a number": (0, ("group",)),
    "a text": ("0", ("group",)),
}
_UNKNOWN = ("unknown reduction", "SUM AVERAGE")
_TOO_LARGE = ("9223372036854775808 doesn't fit into 64 bits",)
_LAST = "rank {last}: "

MISTAKES: dict[str, Mistake] = {
    **{
        f"{name} {rank!r}": Mistake(
            lambda call=call, rank=rank: call(rank),  # type: ignore[misc]
            ArgumentError,
            (f"{name.split()[1]}={rank!r}", *RANKS),
        )
        for name, call in _ROOTS.items()
        for rank in _NO_RANKS
    },
    **{
        f"group: {name}": Mistake(
            lambda group=group: idist.all_reduce(1, group=group),  # type: ignore[misc]
            ArgumentError,
            words,
        )
        for name, (group, words) in _GROUPS.items()
    },
    **{
        f"new_group: {name}": Mistake(
            lambda ranks=ranks: idist.new_group(ranks),  # type: ignore[misc]
            ArgumentError,
            ("ranks",),
        )
        for name, (ranks, _) in _GROUPS.items()
    },
    "src isn't a member": Mistake(
        lambda: idist.broadcast(1, src=0, group=[1]),
        GroupMembershipError,
        ("src=0 isn't a member of the group (1,)",),
        2,
    ),
    "op": Mistake(
        lambda: idist.all_reduce(1, "NOPE"),  # type: ignore[call-overload]
        ArgumentError,
        ("'NOPE'", *_UNKNOWN),
    ),
    "op of a tensor": Mistake(
        lambda: idist.all_reduce_(torch.ones(1), "NOPE"),  # type: ignore[call-overload]
        ArgumentError,
        ("'NOPE'", *_UNKNOWN),
    ),
    "op is None": Mistake(
        lambda: idist.reduce(1, op=None),  # type: ignore[call-overload]
        ArgumentError,
        ("None", *_UNKNOWN),
    ),
    "all_gather of a large int": Mistake(lambda: idist.all_gather(2**63), PayloadError, _TOO_LARGE),
    "all_reduce of a large int": Mistake(
        lambda: idist.all_reduce(2**63 if is_last() else 1), PayloadError, (_LAST, *_TOO_LARGE)
    ),
    "broadcast of a large int": Mistake(
        lambda: idist.broadcast(2**63, src=last()), PayloadError, (_LAST, *_TOO_LARGE)
    ),
    "all_gather of what can't be pickled": Mistake(
        lambda: idist.all_gather(threading.Lock() if is_last() else 1), PayloadError, (_LAST, LOCK)
    ),
    "broadcast of what can't be pickled": Mistake(
        lambda: idist.broadcast(threading.Lock(), src=last()), PayloadError, (_LAST, LOCK)
    ),
    "gather of what can't be pickled": Mistake(
        lambda: idist.gather({"a": threading.Lock() if is_last() else 1}),
        PayloadError,
        (_LAST, LOCK),
    ),
    "scatter of what can't be pickled": Mistake(
        lambda: idist.scatter(many(threading.Lock()), src=last()), PayloadError, (_LAST, LOCK)
    ),
    "all_to_all of what can't be pickled": Mistake(
        lambda: idist.all_to_all(many(threading.Lock() if is_last() else 1)),
        PayloadError,
        (_LAST, LOCK),
    ),
    "all_reduce of text": Mistake(
        lambda: idist.all_reduce("x" if is_last() else 1),  # type: ignore[type-var]
        PayloadError,
        (_LAST, "a str can't be"),
    ),
    "all_reduce of text in a dict": Mistake(
        lambda: idist.all_reduce({"a": 1, "b": ["x" if is_last() else 2]}),
        PayloadError,
        (_LAST, "a str at {{'b'}}[0] can't be"),
    ),
    "bits of floats": Mistake(
        lambda: idist.all_reduce(torch.ones(1), "AND"), PayloadError, ("AND works on integer",)
    ),
    "scatter of too few": Mistake(
        lambda: idist.scatter([1] * (last() + 2), src=last()), PayloadError, (_LAST, "one for each")
    ),
    "all_to_all of too many": Mistake(
        lambda: idist.all_to_all([1] * (last() + 2)), PayloadError, ("a list of",)
    ),
    "reduce_scatter of a scalar": Mistake(
        lambda: idist.reduce_scatter(torch.tensor(1)), PayloadError, ("dim 0 is a multiple of",)
    ),
    "initialize twice": Mistake(
        lambda: idist.initialize("gloo"),
        idist.errors.AlreadyInitializedError,
        ("live already (rank {rank} of", "call finalize() first"),
    ),
}


def make_all(local_rank: int) -> dict[str, tuple[type | None, str]]:
    """Make every mistake, and see after each that the context still works."""
    made: dict[str, tuple[type | None, str]] = {}
    for name, mistake in MISTAKES.items():
        if idist.get_world_size() < mistake.least_size:
            continue
        try:
            value = mistake.call()
        except Exception as error:
            made[name] = (type(error), str(error))
        else:
            made[name] = (None, f"returned {value!r}")
        assert idist.all_reduce(1) == idist.get_world_size(), name
    return made
