"""Plain values, containers and objects arrive exact in value and type."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import unisono as idist
from unisono.errors import PayloadError
from unisono.testing.cases._law import law, raises, same, worlds

__all__ = ("PLAIN",)

PLAIN: tuple[Any, ...] = (
    *(0, -1, 2**24 + 1, 2**53 + 1, 2**60, 2**63 - 1, -(2**63), True, False, None),
    *(0.1, -0.0, 1e300, float("inf"), float("nan"), 2.5 - 1j),
    *("", "x", "é", "日本" * 300, "\udc80", b"", b"\0\xff" * 200, Path("x"), Path("é/y")),
)


class Point(NamedTuple):
    """A namedtuple that travels."""

    x: int
    y: Any


@dataclass(frozen=True)
class Record:
    """A dataclass that travels."""

    name: str
    value: Any


def _objects(rank: int) -> list[Any]:
    return [
        {"a": torch.arange(3) + rank, "b": [1, "x", None, (2.5, True)]},
        {"big": 10**400, 7: {"nested": [[], {}, ()]}},
        [Point(rank, "p"), Record("r", [rank])],
        {1, 2, rank},
        Fraction(1, 3 + rank),
        bytearray(b"abc"),
        {"deep": {"t": torch.ones(2, 3, dtype=torch.bfloat16) * rank}, "path": Path("/a/b")},
    ]


@law()
def broadcast_carries_plain_values_exactly() -> None:
    rank, size = worlds()
    for src in range(size):
        for value in PLAIN:
            same(idist.broadcast(value if rank == src else None, src=src), value, (src, value))


@law()
def broadcast_ignores_what_other_ranks_pass() -> None:
    rank, size = worlds()
    strangers = [object(), torch.ones(5), "text", 3, lambda: None]
    for other in strangers:
        same(idist.broadcast(2**60 if rank == size - 1 else other, src=size - 1), 2**60)
        same(idist.broadcast(2**60, src=0, safe_mode=True), 2**60)


@law()
def all_gather_carries_plain_values_exactly() -> None:
    _, size = worlds()
    for value in PLAIN:
        same(idist.all_gather(value), [value] * size, value)


@law()
def all_gather_takes_values_that_differ_in_length_and_kind() -> None:
    rank, size = worlds()
    same(idist.all_gather("é" * rank), ["é" * r for r in range(size)])
    same(idist.all_gather(b"z" * (rank * 300)), [b"z" * (r * 300) for r in range(size)])
    kinds: list[Any] = [1, "one", 1.0, None, b"one"]
    same(idist.all_gather(kinds[rank % 5]), [kinds[r % 5] for r in range(size)])


@law()
def objects_and_containers_arrive_exact() -> None:
    rank, size = worlds()
    for index, value in enumerate(_objects(rank)):
        same(idist.all_gather(value), [_objects(r)[index] for r in range(size)], value)
        src = size - 1
        same(idist.broadcast(value, src=src), _objects(src)[index], value)


@law()
def large_objects_of_one_rank_arrive() -> None:
    rank, size = worlds()
    value = {"text": "é" * 50_000, "t": torch.arange(20_000)} if rank == size - 1 else {}
    gathered = idist.all_gather(value)
    same(gathered[:-1], [{}] * (size - 1))
    same(gathered[-1], {"text": "é" * 50_000, "t": torch.arange(20_000)})


@law()
def what_arrives_is_a_copy() -> None:
    _, size = worlds()
    value = {"list": [1], "t": torch.zeros(3)}
    for got in (idist.broadcast(value), idist.all_gather(value)[0], idist.all_gather(value)[-1]):
        got["list"].append(2)
        got["t"].add_(1)
    same(value, {"list": [1], "t": torch.zeros(3)})


@law()
def a_value_that_cant_travel_is_an_error_on_every_rank() -> None:
    rank, size = worlds()
    bad = size - 1
    stuck: Any = iter([1]) if rank != bad else (n for n in range(3))
    raises(PayloadError, partial(idist.all_gather, stuck), [f"rank {bad}", "generator"])
    raises(PayloadError, partial(idist.broadcast, stuck, src=bad), [f"rank {bad}", "generator"])
    raises(PayloadError, partial(idist.gather, stuck), [f"rank {bad}", "generator"])
    same(idist.all_gather(rank), list(range(size)))


@law()
def ints_beyond_64_bits_are_refused_on_every_rank() -> None:
    rank, size = worlds()
    for value in (2**63, -(2**63) - 1, 10**400):
        wrong = value if rank == size - 1 else 1
        raises(PayloadError, partial(idist.all_reduce, wrong), [f"rank {size - 1}"])
        raises(PayloadError, partial(idist.all_gather, wrong), [f"rank {size - 1}"])
        raises(PayloadError, partial(idist.broadcast, value), ["rank 0"])
