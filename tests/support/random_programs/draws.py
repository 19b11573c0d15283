"""How scenes of random programs are drawn, by family."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.odd_tensors import ODD
from tests.support.random_programs.programs import Point, Step, call, steps
from tests.support.random_programs.scenes import (
    ASYNC_MOVES,
    CHILD_CALLS,
    OVERLAPS,
    RAISING,
    AtOnce,
    Fork,
    Handles,
    Mean,
    Odd,
    OneMore,
    Plain,
    Raising,
    Refused,
    Scene,
    Tied,
)

__all__ = ("FAMILIES", "LAST", "scene_programs")

_LARGE = 120_000  # of float32, longer than what travels in a round of three ranks
_LARGER = 1_200_000  # longer than a block of shared memory; of three dtypes of four
_INT64 = range(-(2**63), 2**63)


def _some(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw one rank, or some, or all."""
    ranks = st.sets(st.integers(0, size - 1), min_size=1)
    return (ranks | st.just(set(range(size)))).map(lambda found: tuple(sorted(found)))


def _plain(size: int) -> st.SearchStrategy[Scene]:
    return st.builds(Plain, steps(size))


# Groups, threads, handles


@st.composite
def _turns(draw: st.DrawFn, size: int) -> tuple[tuple[int, ...], tuple[tuple[Step, ...], ...]]:
    ranks = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=min(2, size)))))
    turns = st.lists(steps(size, ranks) | _large(size, ranks), min_size=1, max_size=4).map(tuple)
    return ranks, tuple(draw(turns) for _ in range(draw(st.integers(2, 3))))


@st.composite
def _large(draw: st.DrawFn, size: int, ranks: tuple[int, ...] | None) -> Step:
    """Make a call on a tensor that rides the data plane, in one block or several."""
    numbers = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    reductions = ["all_reduce", "all_reduce_", "reduce", "reduce_scatter"]
    name = draw(st.sampled_from([*reductions, "broadcast_", "all_gather", "all_to_all"]))
    root = draw(st.sampled_from(ranks or range(size)))
    numel = draw(st.sampled_from([_LARGE, _LARGE, _LARGER]))
    dtype = getattr(torch, draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8"])))
    values = tuple(torch.full((numel,), number, dtype=dtype) for number in numbers)
    return Step(name, values, root, draw(st.sampled_from(["SUM", "MAX"])), ranks)


@st.composite
def _in_turns(draw: st.DrawFn, size: int) -> Scene:
    ranks, turns = draw(_turns(size))
    lefts = [i for i, calls in enumerate(turns) for _ in calls]
    return AtOnce(ranks, turns, tuple(draw(st.permutations(lefts))))


@st.composite
def _in_threads(draw: st.DrawFn, size: int) -> Scene:
    ranks, turns = draw(_turns(size))
    delays = st.tuples(*(st.integers(0, 5) for _ in turns))
    return AtOnce(ranks, turns, (), tuple(draw(delays) for _ in range(size)))


@st.composite
def _handles(draw: st.DrawFn, size: int) -> Scene:
    started = draw(st.lists(steps(size) | _large(size, None), min_size=2, max_size=5))
    order = tuple(draw(st.permutations(range(len(started)))))
    sync_at = draw(st.none() | st.integers(1, len(started) - 1))
    return Handles(tuple(started), order, sync_at, draw(st.none() | steps(size)))


# Forks


def _forks(size: int) -> st.SearchStrategy[Scene]:
    return st.builds(Fork, _some(size), st.sampled_from(sorted(CHILD_CALLS)), st.booleans())


# Tensors

_ODD_CALLS = (
    *("all_reduce", "all_reduce_", "reduce", "reduce_scatter", "broadcast_", "all_to_all"),
    *("all_gather", "gather", "broadcast", "all_gather in a list", "all_reduce in a dict"),
    *("scatter", "all_reduce_params", "broadcast_params", "reduce_dict"),
)


@st.composite
def _odd(draw: st.DrawFn, size: int, kinds: tuple[str, ...]) -> Scene:
    name = draw(st.sampled_from(_ODD_CALLS))
    numel = draw(st.sampled_from([12, 12, 12, _LARGE]))
    root = draw(st.integers(0, size - 1))
    is_async = not name.endswith("params") and name != "reduce_dict" and draw(st.booleans())
    return Odd(draw(st.sampled_from(kinds)), name, draw(_some(size)), numel, root, is_async)


@st.composite
def _tied(draw: st.DrawFn, size: int) -> Scene:
    calls = ["all_reduce_params", "all_reduce_params of a state dict", "all_reduce_grads"]
    name = draw(st.sampled_from([*calls, "broadcast_params", "mmengine's all_reduce_params"]))
    is_large = draw(st.booleans())
    dtypes = ["float32", "float64"] if is_large else ["float32", "bfloat16", "float64"]
    dtypes += [] if name == "all_reduce_grads" else ["int64"] if is_large else ["int8", "int64"]
    options = [(), (("coalesce", False),), (("bucket_size_mb", 1),)]
    return Tied(
        draw(st.sampled_from(sorted(OVERLAPS))),
        name,
        draw(_some(size)),
        300_000 if is_large else 24,
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from(["sum", "mean", "max"])),
        () if name == "broadcast_params" else draw(st.sampled_from(options)),
        draw(st.integers(0, size - 1)),
        draw(st.integers(0, 3)) == 0,
    )


# Means

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")
_WHOLE = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_MEANS = (
    *("all_reduce", "all_reduce, async", "all_reduce in a dict", "all_reduce_", "reduce"),
    *("all_reduce_, async", "reduce_scatter", "reduce_mean", "reduce_dict", "all_reduce_params"),
    *("all_reduce_grads", "mmengine's all_reduce", "mmengine's all_reduce_dict"),
    "mmengine's all_reduce_params",
)
_NUMBER_MEANS = ("all_reduce", "all_reduce, async", "all_reduce in a dict", "reduce_mean")


def _numbers_of(dtype: torch.dtype) -> st.SearchStrategy[Any]:
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        real = _numbers_of(dtype.to_real()).filter(math.isfinite)
        return st.builds(complex, real, real)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        fractions = [1.0, 0.9, 0.5, -1.0, -0.7, 1 / 3]
        limits = [torch.tensor(info.max * x, dtype=dtype).item() for x in fractions]
        small = [0.0, 1.0, 3.0, 0.1, info.tiny, info.smallest_normal * info.eps]
        small = [torch.tensor(x, dtype=dtype).item() for x in small]
        return st.sampled_from([*limits, *small, float("inf"), float("nan")])
    whole = torch.iinfo(dtype)
    near = [whole.max, whole.max - 1, whole.min, whole.min + 2, whole.max // 2, whole.max // 3 * 2]
    return st.sampled_from([*near, 0, 1, 3, 100])


@st.composite
def _mean(draw: st.DrawFn, size: int) -> Scene:
    if draw(st.integers(0, 3)) == 0:
        return draw(_mean_of_numbers(size))
    name = draw(st.sampled_from(_MEANS))
    names: tuple[str, ...] = (*_FLOATS, *_COMPLEX)
    if name != "all_reduce_grads":
        names = (*names, *_WHOLE, "bool")
    dtype = draw(st.sampled_from(names))
    rows = st.lists(_numbers_of(getattr(torch, dtype)), min_size=2, max_size=2).map(tuple)
    values = (draw(rows),) * size
    if draw(st.booleans()):
        values = tuple(draw(rows) for _ in range(size))
    repeats = draw(st.sampled_from([1, 1, 1, _LARGE]))
    return Mean(name, values, dtype, repeats)


@st.composite
def _mean_of_numbers(draw: st.DrawFn, size: int) -> Scene:
    kind = draw(st.sampled_from(["int", "float", "bool", "complex", "mixed"]))
    number: dict[str, st.SearchStrategy[Any]] = {
        "int": st.integers(-(2**63), 2**63 - 1) | st.sampled_from([2**63 - 1, -(2**63), 2**62]),
        "float": _numbers_of(torch.float64),
        "bool": st.booleans(),
        "complex": _numbers_of(torch.complex128),
    }
    number["mixed"] = st.integers(-9, 9) | number["float"]
    values = tuple((draw(number[kind]),) for _ in range(size))
    return Mean(draw(st.sampled_from(_NUMBER_MEANS)), values)


# Numbers at their limits, and values that don't fit together


_limits = st.sampled_from(
    [2**63 - 1, -(2**63), 2**62, 0, -1, 1.7e308, -1.7e308, 5e-324, -0.0, 0.0, float("inf")]
) | st.sampled_from([float("nan"), float("-inf"), 2**53 + 1, 1e308, True, False])


@st.composite
def _number_limits(draw: st.DrawFn, size: int) -> Scene:
    op = draw(st.sampled_from(["SUM", "PRODUCT", "MIN", "MAX"]))
    name = draw(st.sampled_from(["all_reduce", "reduce"]))
    kind = draw(st.sampled_from(["int", "float"]))
    one = _limits.filter(lambda x: type(x).__name__ == kind)
    values = tuple(draw(one) for _ in range(size))
    return Extremes(Step(name, values, draw(st.integers(0, size - 1)), op))


class Extremes(Plain):
    """A reduction of numbers at their limits: NaN wins, and -0.0 is below 0.0."""

    def fault(self, found: list[Any]) -> str | None:
        step = self.step
        if step.op in ("MIN", "MAX") and any(value != value for value in step.values):
            values: tuple[Any, ...] = (float("nan"),) * len(step.values)
        elif step.op in ("MIN", "MAX"):
            signed = sorted(step.values, key=lambda x: (x, str(x)[:1] != "-"))
            values = (signed[0 if step.op == "MIN" else -1],) * len(step.values)
        else:
            values = step.values
        return Plain(Step(step.call, values, step.root, step.op)).fault(found)


_misfits: tuple[tuple[Any, Any], ...] = (
    (1, 2**63),
    (1, -(2**63) - 1),
    ({"a": 1}, {"a": 2**70}),
    ([1, 2], (1, 2)),
    ([1, 2], {0: 1, 1: 2}),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 1, "b": 1}),
    ([1], [1, 1]),
    ([1], [[1]]),
    ([], [1]),
    (1, [1]),
    (1, torch.ones(1)),
    (1, "text"),
    (1, None),
    (1.0, Fraction(1, 3)),
    (1, np.ones(3)),
    (1.0, np.longdouble("1.00000000000000000011")),
    (torch.ones(2), torch.ones(3)),
    (torch.ones(2), torch.ones(2, dtype=torch.float64)),
    (torch.ones(2), torch.ones(2, 1)),
    (torch.ones(_LARGE), torch.ones(3)),
    (torch.ones(_LARGE), torch.ones(_LARGE, dtype=torch.int32)),
    ({"a": torch.ones(2)}, {"a": torch.ones(3)}),
    ({"a": torch.ones(2)}, {"a": 1.0}),
    (Point(1, 2), {"x": 1, "y": 2}),
    (Point(1, 2), Point(1, (2,))),
)


@st.composite
def _misfit(draw: st.DrawFn, size: int) -> Scene:
    right, wrong = draw(st.sampled_from(_misfits))
    victim = draw(st.integers(0, size - 1))
    values = tuple(wrong if rank == victim else right for rank in range(size))
    name = draw(st.sampled_from(["all_reduce", "reduce"]))
    return Refused(Step(name, values, draw(st.integers(0, size - 1))))


@st.composite
def _tensor_limits(draw: st.DrawFn, size: int) -> Scene:
    name = draw(st.sampled_from([*_WHOLE, *_FLOATS]))
    dtype: torch.dtype = getattr(torch, name)
    row = st.lists(_numbers_of(dtype), min_size=3, max_size=3).map(tuple)
    ops = ["MIN", "MAX"] if dtype.is_floating_point else ["SUM", "PRODUCT", "MIN", "MAX", "XOR"]
    return Wraps(
        draw(st.sampled_from(["all_reduce", "all_reduce_", "reduce"])),
        tuple(draw(row) for _ in range(size)),
        name,
        draw(st.sampled_from([1, 1, 1, _LARGE])),
        draw(st.integers(0, size - 1)),
        draw(st.sampled_from(ops)),
    )


@dataclass(frozen=True)
class Wraps:
    """A reduction of tensors at the limits of their dtype.

    Whole numbers wrap as torch's do; of floats MIN and MAX are exact, and NaN wins. Rows come and
    go as lists, for plain pickle can't read tensors of torch.uint16, uint32 and uint64.
    """

    call: str
    rows: tuple[tuple[Any, ...], ...]
    dtype: str
    repeats: int
    root: int
    op: str

    def play(self, rank: int) -> Any:
        value = torch.tensor(self.rows[rank], dtype=getattr(torch, self.dtype))
        step = Step(self.call, (value.repeat(self.repeats),) * len(self.rows), self.root, self.op)
        got = call(step, step.values[rank])
        if not isinstance(got, torch.Tensor):
            return got
        data = got.reshape(self.repeats, -1).view(torch.uint8)
        is_one = torch.equal(data, data[:1].expand_as(data))
        return str(got.dtype), got[: len(self.rows[0])].tolist(), is_one

    def fault(self, found: list[Any]) -> str | None:
        total = _folded(self.op, self.rows, self.dtype)
        for rank, got in enumerate(found):
            wanted: Any = (f"torch.{self.dtype}", total, True)
            if self.call == "reduce" and rank != self.root:
                wanted = None
            if str(got).replace("-0.0", "0.0") != str(wanted).replace("-0.0", "0.0"):
                return f"rank {rank} got {got!r} instead of {wanted!r}"
        return None


def _folded(op: str, rows: tuple[tuple[Any, ...], ...], name: str) -> list[Any]:
    dtype: torch.dtype = getattr(torch, name)
    columns = list(zip(*rows, strict=True))
    if dtype.is_floating_point:
        order: Any = min if op == "MIN" else max
        nan = float("nan")
        return [nan if any(x != x for x in column) else order(column) for column in columns]
    numbers: dict[str, Callable[[int, int], int]] = {
        "SUM": lambda a, b: a + b,
        "PRODUCT": lambda a, b: a * b,
        "MIN": min,
        "MAX": max,
        "XOR": lambda a, b: a ^ b,
    }
    bits, least = 8 * dtype.itemsize, torch.iinfo(dtype).min
    totals = [reduce(numbers[op], column) for column in columns]
    return [(total - least) % 2**bits + least for total in totals]


def _limits_of_all(size: int) -> st.SearchStrategy[Scene]:
    return _number_limits(size) | _misfit(size) | _tensor_limits(size)


# Values that raise, and calls too many


@st.composite
def _raising(draw: st.DrawFn, size: int) -> Scene:
    kind = draw(st.sampled_from(sorted(RAISING)))
    reductions = ["all_reduce", "all_reduce of a dict", "reduce", "reduce_dict", "reduce_mean"]
    moves = ["all_gather", "gather", "broadcast", "scatter", "all_to_all", "broadcast_params"]
    if kind in ("float", "a dict of float", "int", "key", "list", "dict", "record", "torch"):
        moves = [*reductions, "all_gather"]
    else:
        moves = [*moves, *reductions, "all_reduce_params"]
    name = draw(st.sampled_from(moves))
    is_async = name in ASYNC_MOVES and draw(st.booleans())
    return Raising(kind, name, draw(st.integers(0, size - 1)), is_async)


@st.composite
def _one_more(draw: st.DrawFn, size: int) -> Scene:
    names = st.sampled_from(["all_reduce", "all_gather", "broadcast"])
    calls = tuple(draw(st.lists(names, min_size=3, max_size=5)))
    at = draw(st.integers(0, len(calls) - 2))
    kind = draw(st.sampled_from(["number", "tensor", "dict", "large"]))
    return OneMore(
        calls, at, draw(names), draw(st.integers(0, size - 1)), kind, draw(st.booleans())
    )


FAMILIES: dict[str, Callable[[int], st.SearchStrategy[Scene]]] = {
    "calls": _plain,
    "groups": _in_turns,
    "threads": _in_threads,
    "handles": _handles,
    "forks": _forks,
    "odd tensors": lambda size: _odd(size, tuple(sorted(set(ODD) - {"dtensor"}))),
    "overlaps": _tied,
    "means": _mean,
    "limits": _limits_of_all,
    "raising values": _raising,
}
"""What may come anywhere in a program: after it the ranks are in step."""

LAST: dict[str, Callable[[int], st.SearchStrategy[Scene]]] = {"a call too many": _one_more}
"""What ends a program."""


_LEFT_OUT = {"threads": ("threads",)}  # a thread that a replica starts isn't a replica


@st.composite
def scene_programs(
    draw: st.DrawFn, size: int, backend: str, family: str, longest: int = 4
) -> list[Scene]:
    """Make a program of a family's scenes and single calls; "all" takes of every family."""
    if family in LAST:
        before = draw(st.lists(_plain(size), max_size=longest - 1))
        return [*before, draw(LAST[family](size))]
    left_out = _LEFT_OUT.get(backend, ())
    makers = {name: make for name, make in FAMILIES.items() if name not in left_out}
    if backend == "gloo":
        makers["odd tensors"] = lambda size: _odd(size, tuple(sorted(ODD)))
    own = st.one_of(*(make(size) for make in makers.values()))
    own = own if family == "all" else makers[family](size)
    scenes = st.lists(own | _plain(size), max_size=longest - 1)
    return [*draw(scenes), draw(own), Plain(Step("all_gather", tuple(range(size))))]
