"""all_reduce, reduce and reduce_scatter, for every operation, dtype and root."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add, and_, mul, or_, xor
from typing import Any

import torch
from torch import Tensor

import unisono as idist
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.testing.cases._law import law, raises, same, tensor_of

INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
_BITWISE = {"AND": and_, "OR": or_, "XOR": xor}
_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": add,
    "PRODUCT": mul,
    "MIN": min,
    "MAX": max,
    **_BITWISE,
}
_BOOL = {"SUM": or_, "PRODUCT": and_, "MIN": and_, "MAX": or_, **_BITWISE}


def _ops(dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the operations that have a meaning for a dtype."""
    if dtype in COMPLEX:
        return ("SUM", "PRODUCT", "AVERAGE")
    if dtype in FLOATS:
        return ("SUM", "PRODUCT", "MIN", "MAX", "AVERAGE")
    return ("SUM", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR")


def expected(op: str, parts: list[Tensor]) -> Tensor:
    """Reduce with Python's numbers, so that the reference shares no code with a model."""
    dtype, shape = parts[0].dtype, parts[0].shape
    columns = list(zip(*(_numbers(part) for part in parts), strict=True))
    if op == "AVERAGE":
        numbers = [reduce(add, column) / len(column) for column in columns]
    else:
        step = _BOOL[op] if dtype is torch.bool else _STEPS[op]
        numbers = [reduce(step, column) for column in columns]
    # A result that exceeds the dtype is rounded or wrapped by `to`.
    return torch.tensor(numbers, dtype=_wide(dtype)).to(dtype).reshape(shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a reference result, before it is rounded or wrapped to `dtype`."""
    if dtype in COMPLEX or dtype is torch.bool:
        return dtype
    return torch.float64 if dtype in FLOATS else torch.int64


def _numbers(tensor: Tensor) -> list[Any]:
    """Return a tensor's elements as Python's numbers."""
    return list(tensor.to(_wide(tensor.dtype)).reshape(-1).tolist())


@law()
def all_reduce_is_right_for_every_dtype_and_operation(rank: int, size: int) -> None:
    for dtype in DTYPES:
        for op in _ops(dtype):
            parts = [tensor_of(r, (3, 2), dtype) for r in range(size)]
            same(idist.all_reduce(parts[rank], op), expected(op, parts), (dtype, op))


@law()
def all_reduce_takes_every_shape_and_layout(rank: int, size: int) -> None:
    for shape in ((), (0,), (2, 0), (1,), (70, 3)):
        parts = [tensor_of(r, shape, torch.float32) for r in range(size)]
        same(idist.all_reduce(parts[rank]), expected("SUM", parts), shape)
    images = [tensor_of(r, (2, 3, 4, 5), torch.float64) for r in range(size)]
    totals = expected("SUM", images)
    mine = images[rank]
    layouts = [mine.to(memory_format=torch.channels_last), mine.clone().transpose(0, 3)]
    same(idist.all_reduce(layouts[0]), totals, "channels_last")
    same(idist.all_reduce(layouts[1]), totals.transpose(0, 3), "transposed")
    mixed = mine if rank % 2 else layouts[0]  # ranks have different strides, but the same shape
    same(idist.all_reduce(mixed), totals, "mixed strides")
    same(idist.all_reduce(torch.ones(1).expand(4)), torch.full((4,), float(size)), "expanded")
    same(idist.all_reduce(mine[:, 1:]), totals[:, 1:], "sliced")


@law()
def unsigned_and_negative_extremes_keep_their_order(rank: int, size: int) -> None:
    big = torch.tensor([2**64 - 1 - r for r in range(size)], dtype=torch.uint64)
    same(idist.all_reduce(big[rank : rank + 1], "MAX"), big[:1])
    same(idist.all_reduce(big[rank : rank + 1], "MIN"), big[-1:])
    low = torch.tensor([-128 + rank], dtype=torch.int8)
    same(idist.all_reduce(low, "MIN"), torch.tensor([-128], dtype=torch.int8))


@law()
def large_integers_are_summed_exactly(rank: int, size: int) -> None:
    for dtype in (torch.int64, torch.uint64):
        value = torch.tensor([2**53 + 1, 2**60 + rank], dtype=dtype)
        totals = [size * (2**53 + 1), size * 2**60 + sum(range(size))]
        same(idist.all_reduce(value), torch.tensor(totals, dtype=dtype), dtype)


@law()
def nan_wins_min_and_max(rank: int, size: int) -> None:
    value = torch.tensor([float("nan") if rank == size - 1 else 1.0, float(rank)])
    ends: tuple[tuple[Any, float], ...] = (("MIN", 0.0), ("MAX", float(size - 1)))
    for op, last in ends:
        got = idist.all_reduce(value, op)
        assert got[0].isnan(), (op, got)
        same(got[1].item(), last)
        number = idist.all_reduce(float("nan") if rank == size - 1 else 1.0, op)
        assert number != number, (op, number)


@law()
def the_input_is_never_changed(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.int16, torch.bool):
        value = tensor_of(rank, (300,), dtype)
        kept = value.clone()
        results: list[Any] = [idist.all_reduce(value), idist.broadcast(value)]
        results += [idist.all_gather(value), idist.reduce(value), idist.gather(value)]
        for result in results:
            if result is not None:
                result.fill_(1)  # would change the input if they shared memory
        same(value, kept, dtype)
    tree: Any = {"list": [1], "t": torch.zeros(3)}
    for copy in (idist.broadcast(tree), idist.all_gather(tree)[0], idist.all_gather(tree)[-1]):
        copy["list"].append(2)
        copy["t"].add_(1)
    same(tree, {"list": [1], "t": torch.zeros(3)})
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    got = idist.all_reduce(weight)
    assert not got.requires_grad
    same(weight.detach(), torch.full((3,), float(rank)))


@law()
def numbers_are_reduced_exactly(rank: int, size: int) -> None:
    same(idist.all_reduce(2**53 + 1), size * (2**53 + 1))  # a float would round it
    same(idist.all_reduce(rank, "max"), size - 1)
    same(idist.all_reduce(rank + 1, "PRODUCT"), reduce(mul, range(1, size + 1)))
    same(idist.all_reduce(rank, "mean"), sum(range(size)) / size)
    same(idist.all_reduce(0.1 * rank), reduce(add, (0.1 * r for r in range(size))))
    same(idist.all_reduce(complex(rank, 1)), complex(sum(range(size)), size))
    same(idist.all_reduce(True), True)
    same(idist.all_reduce(rank == 0, "AND"), size == 1)
    same(idist.all_reduce(1 << rank, "OR"), 2**size - 1)
    mixed: Any = 1 if rank == 0 else 0.5
    same(idist.all_reduce(mixed), reduce(add, (1, *[0.5] * (size - 1))))


@dataclass
class Metrics:
    """A dataclass of metrics; `hits` is a tensor or a dict of tensors."""

    loss: float
    seen: int
    hits: Any


@law()
def containers_are_reduced_leaf_by_leaf_and_keep_their_shape(rank: int, size: int) -> None:
    value = {"loss": 0.5, "n": rank, "t": torch.ones(2), "more": [torch.ones(1).int(), (True, 2)]}
    totals = {
        "loss": 0.5 * size,
        "n": sum(range(size)),
        "t": torch.full((2,), float(size)),
        "more": [torch.tensor([size], dtype=torch.int32), (True, 2 * size)],
    }
    same(idist.all_reduce(value), totals)
    got = idist.all_reduce(Metrics(1.0, 2, torch.ones(3)))
    same((got.loss, got.seen, got.hits), (1.0 * size, 2 * size, torch.full((3,), float(size))))
    same(idist.all_reduce({}), {})
    # So many names don't fit into one message.
    many = {f"a name that takes room {i}": float(i) for i in range(3000)}
    same(idist.all_reduce(many), {key: size * item for key, item in many.items()})
    same(value["t"], torch.ones(2))


@law()
def reduce_gives_the_result_to_its_root_alone(rank: int, size: int) -> None:
    for dst in range(size):
        for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64):
            parts = [tensor_of(r, (5,), dtype) for r in range(size)]
            got = idist.reduce(parts[rank], dst=dst)
            same(got, expected("SUM", parts) if rank == dst else None, (dst, dtype))
        same(idist.reduce(rank, dst=dst, op="MAX"), size - 1 if rank == dst else None)


@law()
def reduce_scatter_gives_each_rank_its_part(rank: int, size: int) -> None:
    for dtype in DTYPES:
        parts = [tensor_of(r, (2 * size, 3), dtype) for r in range(size)]
        for op in _ops(dtype)[:2]:  # SUM and PRODUCT
            part = expected(op, parts)[2 * rank : 2 * rank + 2]
            same(idist.reduce_scatter(parts[rank], op), part, (dtype, op))
    raises(PayloadError, [str(size)], idist.reduce_scatter, torch.ones(()))


@law()
def in_place_forms_change_their_argument(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bool, torch.int16, torch.bfloat16):
        parts = [tensor_of(r, (4,), dtype) for r in range(size)]
        value = parts[rank].clone()
        assert idist.all_reduce_(value) is value
        same(value, expected("SUM", parts), dtype)
    strided = torch.zeros(4, 2)
    idist.all_reduce_(strided[:, 0].add_(rank + 1))
    same(strided[:, 0], torch.full((4,), float(sum(range(1, size + 1)))))
    same(strided[:, 1], torch.zeros(4))
    for rows in (slice(0), slice(1)):  # a column of 0 or 1 rows is contiguous with any stride
        column = torch.ones(4, 2)[rows, 0]
        same(idist.all_reduce_(column), torch.full(column.shape, float(size)), rows)
        same(idist.all_reduce_(column, async_op=True).wait(), torch.full(column.shape, size**2.0))
    average = torch.full((2,), float(rank))
    same(idist.all_reduce_(average, "mean"), torch.full((2,), sum(range(size)) / size))
    same(average, torch.full((2,), sum(range(size)) / size))
    weight = torch.nn.Parameter(torch.ones(2))
    idist.all_reduce_(weight)
    same(weight.detach(), torch.full((2,), float(size)))
    same(idist.all_reduce_(torch.ones(2), async_op=True).wait(), torch.full((2,), float(size)))


@law()
def asynchronous_forms_give_what_blocking_ones_give(rank: int, size: int) -> None:
    tensor = torch.full((3,), float(rank))
    total, last = sum(range(size)), size - 1
    joined = torch.arange(size, dtype=torch.float32).repeat_interleave(3)
    started: list[tuple[Any, Any]] = [
        (idist.all_reduce(tensor, async_op=True), torch.full((3,), float(total))),
        (idist.all_reduce(tensor, "mean", async_op=True), torch.full((3,), total / size)),
        (idist.all_reduce(rank, async_op=True), total),
        (idist.all_gather(f"r{rank}", async_op=True), [f"r{r}" for r in range(size)]),
        (idist.broadcast({"v": rank}, src=last, async_op=True), {"v": last}),
        (idist.all_gather(tensor, async_op=True), joined),
        (idist.barrier(async_op=True), None),
    ]
    for handle, value in reversed(started):
        same(handle.wait(), value)
        assert handle.is_completed()
        assert handle.wait() is handle.wait()


@law()
def a_mean_overflows_nowhere(rank: int, size: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2):
        # The largest power of two: the sum of two overflows, and the mean is exact.
        power = 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 1)
        for count in (3, 50_000):
            value = torch.full((count,), power, dtype=dtype)
            same(idist.all_reduce(value, "mean"), value, dtype)
            same(idist.all_reduce_(value.clone(), "mean"), value, dtype)
            same(idist.all_reduce(value, "mean", async_op=True).wait(), value, dtype)
            rows = value.repeat(size)
            same(idist.reduce_scatter(rows, "mean"), value, dtype)
        same(idist.all_reduce({"x": value}, "mean"), {"x": value})
    number = 2.0**1023
    same(idist.all_reduce(number, "mean"), number)
    same(idist.all_reduce(complex(number, -number), "mean"), complex(number, -number))
    same(idist.all_reduce([2**62, number], "mean"), [float(2**62), number])
    infinite = torch.tensor([float("inf"), 1.0])
    same(idist.all_reduce(infinite, "mean"), infinite)
    same(idist.all_reduce(float("inf") if rank == 0 else 1.0, "mean"), float("inf"))
    # The least float16: terms that were scaled in float16 would be rounded to 0.
    small = torch.tensor([6e-8, -6e-8], dtype=torch.float16)
    same(idist.all_reduce(small, "mean"), small)


@law(ranks=2)
def containers_of_different_kinds_are_an_error_on_every_rank(rank: int, size: int) -> None:
    pairs: list[tuple[Any, Any]] = [
        ([1, 2], {0: 1, 1: 2}),
        ([1, 2], (1, 2)),
        ((1, 2), {0: 1, 1: 2}),
        ([], {}),
        ({"a": []}, {"a": {}}),
        ([[], 1], [1]),
        ({1: 1}, {"1": 1}),
        ({"loss": 1.0, "seen": 2, "hits": torch.ones(3)}, Metrics(1.0, 2, torch.ones(3))),
    ]
    for pair in pairs:
        value = pair[min(rank, 1)]
        raises(CollectiveMismatchError, ["rank 0", "rank 1"], idist.all_reduce, value)
    value = {"a": 1, "only_here": 2} if rank == 0 else {"a": 1}
    raises(CollectiveMismatchError, ["rank 0", "only_here"], idist.all_reduce, value)
    many = {f"a name that takes room {i}": i for i in range(3000 + (rank == 0))}
    raises(CollectiveMismatchError, ["rank 0", "room 3000"], idist.all_reduce, many)
    parts = ["rank 0 has  empty dict", "rank 1 has a number"]
    raises(CollectiveMismatchError, parts, idist.all_reduce, {} if rank == 0 else 5)
    bad = {"a": "text"} if rank == size - 1 else {"a": 1}
    raises(PayloadError, [f"rank {size - 1}", "str"], idist.all_reduce, bad)
    same(idist.all_reduce([[], {}, (1,)]), [[], {}, (size,)])
