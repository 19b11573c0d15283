"""Plain values, containers and objects arrive with exact value and type."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.masked import masked_tensor

import unisono as idist
from unisono.errors import PayloadError
from unisono.testing.cases._law import law, quietly, raises, same

PLAIN: tuple[Any, ...] = (
    0, -1, 2**24 + 1, 2**53 + 1, 2**60, 2**63 - 1, -(2**63), True, False, None,
    0.1, -0.0, 1e300, float("inf"), float("nan"), 2.5 - 1j,
    "", "x", "é", "日本" * 300, "\udc80", b"", b"\0\xff" * 200, Path("x"), Path("é/y"),
)  # fmt: skip


class Point(NamedTuple):
    """A namedtuple to send."""

    x: int
    y: Any


@dataclass(frozen=True)
class Record:
    """A dataclass to send."""

    name: str
    value: Any


class Mine(torch.Tensor):
    """A tensor subclass without members, which only pickle can send."""


class NoRepr:
    """An object whose repr() raises."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


@dataclass
class NoValue:
    """A dataclass with an unreadable field."""

    loss: float

    def __getattribute__(self, name: str) -> Any:
        if name == "loss":
            raise KeyError("no loss")
        return super().__getattribute__(name)


class NoFloat(float):
    """A number that can't be converted to a float."""

    def __float__(self) -> float:
        raise OverflowError("no float")


class NoReduce:
    """An object whose pickling raises an error without a readable text."""

    def __reduce__(self) -> str:
        class Mute(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        raise Mute


def _objects(rank: int) -> list[Any]:
    """List objects and containers, which differ by rank."""
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
def broadcast_ignores_what_other_ranks_pass(rank: int, size: int) -> None:
    for other in (object(), torch.ones(5), "text", 3, lambda: None):
        same(idist.broadcast(2**60 if rank == size - 1 else other, src=size - 1), 2**60)
        same(idist.broadcast(2**60, src=0, safe_mode=True), 2**60)


@law()
def plain_values_arrive_exact(rank: int, size: int) -> None:
    for value in PLAIN:
        same(idist.all_gather(value), [value] * size, value)
        for src in range(size):
            same(idist.broadcast(value if rank == src else None, src=src), value, (src, value))


@law()
def all_gather_takes_values_that_differ_in_length_and_kind(rank: int, size: int) -> None:
    same(idist.all_gather("é" * rank), ["é" * r for r in range(size)])
    same(idist.all_gather(b"z" * (rank * 300)), [b"z" * (r * 300) for r in range(size)])
    kinds: list[Any] = [1, "one", 1.0, None, b"one"]
    same(idist.all_gather(kinds[rank % 5]), [kinds[r % 5] for r in range(size)])


@law()
def objects_and_containers_arrive_exact(rank: int, size: int) -> None:
    objects = [_objects(r) for r in range(size)]
    for value, *expected in zip(objects[rank], *objects, strict=True):
        same(idist.all_gather(value), expected, value)
        same(idist.broadcast(value, src=size - 1), expected[-1], value)
    large = {"text": "é" * 50_000, "t": torch.arange(20_000)}
    expected = [*([{}] * (size - 1)), large]
    same(idist.all_gather(expected[rank]), expected, "only one is large")


@law()
def ints_beyond_64_bits_are_refused_on_every_rank(rank: int, size: int) -> None:
    last = f"rank {size - 1}"
    for value in (2**63, -(2**63) - 1, 10**400):  # the last is too large for a float, too
        wrong = value if rank == size - 1 else 1
        raises(PayloadError, [last, "64 bits: reduce a float"], idist.all_reduce, wrong)
        raises(PayloadError, [last, "64 bits: reduce a float"], idist.all_reduce, [wrong])
        raises(PayloadError, [last], idist.all_gather, wrong)
        raises(PayloadError, ["rank 0"], idist.broadcast, value)


@law()
def whatever_is_raised_while_a_value_is_encoded_is_an_error_on_every_rank(
    rank: int, size: int
) -> None:
    last, ones = size - 1, torch.ones(2)
    nested = quietly(torch.nested.nested_tensor, [ones, torch.ones(3)])
    values: dict[tuple[Any, ...], list[tuple[Any, Any, str]]] = {
        (idist.all_reduce, idist.reduce): [
            ({NoRepr(): 1.0}, {1: 1.0}, "no repr"),
            (NoValue(1.0), {1: 1.0}, "no loss"),
            ([NoFloat(1.0)], [1.0], "no float"),
            ([nested], [1.0], "nested"),
        ],
        (idist.all_gather, idist.gather): [
            (nested, ones, "unbind"),
            (NoReduce(), ones, "RuntimeError"),
            ([NoReduce()], ones, ""),
            # A generator can't be pickled, but a list's iterator can.
            ((n for n in range(3)), iter([1]), "generator"),
        ],
        (partial(idist.broadcast, src=last),): [
            ((n for n in range(3)), ones, "generator"),
            ([NoReduce()], ones, ""),
        ],
    }
    for calls, rows in values.items():
        for (bad, good, reason), call in product(rows, calls):
            raises(PayloadError, [f"rank {last}", reason], call, bad if rank == last else good)
    stuck = [NoReduce()] * size
    raises(PayloadError, [f"rank {last}"], idist.scatter, stuck, src=last)
    raises(PayloadError, ["rank 0"], idist.all_to_all, stuck)
    raises(PayloadError, ["rank 0"], idist.all_to_all, {NoRepr(): 1})


@law()
def classes_of_tensors_arrive_as_they_are_where_a_value_is_carried(rank: int, size: int) -> None:
    """Tensors that are joined or reduced arrive as plain ``torch.Tensor`` instead."""
    src = size - 1
    for count in (3, 200_000):  # within one frame, and longer
        plain = torch.arange(float(count))
        frozen = torch.nn.Parameter(plain.clone(), requires_grad=False)
        for value in (torch.nn.Parameter(plain.clone()), frozen, plain.clone().as_subclass(Mine)):
            carried = [
                idist.broadcast(value if rank == src else None, src=src),
                idist.all_gather([value])[src][0],
                idist.all_gather({"deep": (value,)})[src]["deep"][0],
                idist.scatter([value] * size if rank == src else None, src=src),
                idist.all_to_all([value] * size)[src],
            ]
            for got in carried:
                assert type(got) is type(value), (type(got), type(value))
                assert got.requires_grad is value.requires_grad
                assert torch.equal(got.detach(), value.detach())
            rows = value.detach().repeat(size).as_subclass(type(value))
            joined = [idist.all_gather(value), idist.all_reduce(value, "MAX")]
            joined += [idist.all_to_all(rows), idist.reduce_scatter(rows, "MAX")]
            expected = [plain.repeat(size), plain, plain.repeat(size), plain]
            same(joined, expected)
            assert idist.broadcast_(value, src=src) is value
            assert idist.all_reduce_(value, "MAX") is value


@law()
def tensors_of_other_kinds_travel_as_objects(rank: int, size: int) -> None:
    src = size - 1
    mask = torch.tensor([True, False, True])
    masked: Any = quietly(masked_tensor, torch.arange(3.0), mask)
    sparse = torch.eye(3).to_sparse()
    item: Any
    broadcast = idist.broadcast(masked if rank == src else None, src=src)
    for item in (broadcast, idist.all_gather([masked])[0][0]):
        assert type(item) is type(masked)
        same(item.get_mask(), mask)
        same(item.get_data(), masked.get_data())
    for item in (idist.broadcast(sparse, src=src), idist.all_gather([sparse])[src][0]):
        assert item.layout is torch.sparse_coo
        same(item.to_dense(), torch.eye(3))


@law()
def conjugate_and_negative_views_are_what_they_show(rank: int, size: int) -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j] * 100).conj()
    for value in (conjugate, conjugate.imag, torch._neg_view(torch.arange(1.0, 401.0))):
        plain = value.clone().resolve_conj().resolve_neg()
        same(idist.broadcast(value, src=size - 1), plain)
        same(idist.all_gather([value])[-1][0], plain)
        same(idist.all_reduce(value, "SUM"), plain * size)
        same(idist.all_gather(value), plain.repeat(size))
        mine = value.clone().zero_() if rank else value
        same(idist.broadcast_(mine, src=0).resolve_conj().resolve_neg(), plain)
    negative = torch._neg_view(torch.arange(1.0, 401.0))
    same(idist.all_reduce_(negative).resolve_neg(), -torch.arange(1.0, 401.0) * size)


@law()
def empty_tensors_of_any_shape_arrive(rank: int, size: int) -> None:
    for shape in ((0, 2**48), (2**40, 0, 4), (0,)):
        same(idist.all_gather([torch.empty(shape)])[-1][0], torch.empty(shape))
        same(idist.broadcast(torch.empty(shape, dtype=torch.int16)), torch.empty(shape).short())


@law()
def what_pickle_would_turn_into_something_else_doesnt(rank: int, size: int) -> None:
    with Path(__file__).open() as file:
        raises(PayloadError, ["rank 0", "open file"], idist.all_gather, file)
        raises(PayloadError, ["rank 0", "open file"], idist.broadcast, [file])
    for view in (memoryview(b"abcd"), memoryview(bytearray(b"abcd")).cast("H")):
        got = idist.all_gather(view)[-1]
        assert type(got) is memoryview
        assert (got, got.format, got.readonly) == (view, view.format, view.readonly)
