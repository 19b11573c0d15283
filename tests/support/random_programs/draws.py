"""How the steps of random programs are drawn."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.random_programs.odd_tensors import IN_PLACE_REFUSED, WITHOUT_MEMORY, Odd
from tests.support.random_programs.on_ranks import CallTooMany
from tests.support.random_programs.steps import BASIC, Step
from tests.support.random_programs.values import (
    APART,
    OVERLAPS,
    RAISING,
    Filled,
    Overlap,
    Point,
    Raises,
    Text,
)

_LARGE = 120_000  # of float32, longer than what travels in a round of three ranks
_LARGER = 1_200_000  # longer than a block of shared memory; of three dtypes of four
# Sizes on both sides of what travels in a round of the control plane (16 KiB).
_SHAPES = st.sampled_from(((), (0,), (1,), (2, 3), (3, 0, 2), (5000,)))
_WHOLE = ("int64", "int32", "uint8")
_DTYPES = st.sampled_from((*_WHOLE, "float32", "float64", "bfloat16"))
_SIMPLE = ("SUM", "MIN", "MAX")
_OPS = ("PRODUCT", *_SIMPLE)
_BITS = ("AND", "OR", "XOR")

_plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.builds(Path, st.text(alphabet="aé/ ", min_size=1, max_size=6))
)
_objects = st.frozensets(st.integers(), max_size=3) | st.builds(Point, _plain, _plain)


def some_of(size: int, least: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw some ranks, or all, in their order."""
    ranks = st.sets(st.integers(0, size - 1), min_size=min(least, size))
    return (ranks | st.just(set(range(size)))).map(lambda found: tuple(sorted(found)))


def _each(size: int, one: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*[one] * size)


def _tensors(shape: tuple[int, ...], dtype: str) -> st.SearchStrategy[Filled]:
    """Draw tensors of small whole numbers, whose reductions are exact in every order."""
    return st.integers(1, 3).map(lambda least: Filled((least, least + 1, least + 2), dtype, shape))


_leaf = _plain | _objects | _SHAPES.flatmap(lambda shape: _tensors(shape, "int64"))
_values = (
    _plain
    | _objects
    | st.lists(_leaf, max_size=3)
    | st.dictionaries(st.text(max_size=3), _leaf, max_size=3)
    | st.tuples(_leaf, _leaf)
    | st.sampled_from([Text("é", 40_000), Text(b"\0", 200_000)])
)


@st.composite
def _numeric(draw: st.DrawFn, size: int) -> tuple[tuple[Any, ...], str]:
    """Draw for each rank a value of the same structure, and an operation that it has."""
    tensor = _tensors(draw(_SHAPES), draw(_DTYPES))
    bits = _tensors(draw(_SHAPES), draw(st.sampled_from(_WHOLE)))
    number = st.integers(-9, 9)
    container = st.builds(
        lambda a, b, t: {"a": [a, (b,)], "p": Point(t, a)}, number, number, tensor
    )
    floats = st.floats(-1e6, 1e6).filter(lambda x: x != 0)
    kinds: list[tuple[st.SearchStrategy[Any], tuple[str, ...]]] = [
        (st.integers(-1000, 1000), (*_OPS, *_BITS, "AVERAGE")),
        (floats, (*_OPS, "AVERAGE")),
        (st.booleans(), (*_OPS, *_BITS)),
        (tensor, _OPS),
        (bits, _BITS),
        (container, _SIMPLE),
    ]
    one, ops = draw(st.sampled_from(kinds))
    return draw(_each(size, one)), draw(st.sampled_from(ops))


@st.composite
def steps(draw: st.DrawFn, size: int, group: tuple[int, ...] | None = None) -> Step:
    """Draw a right call of `size` ranks, over a group of any ranks if none is given."""
    if group is None and draw(st.booleans()):
        group = tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True)))
    count = size if group is None else len(group)
    root = draw(st.sampled_from(group or range(size)))
    name, dtype, shape = draw(st.sampled_from(tuple(BASIC))), draw(_DTYPES), draw(_SHAPES)
    op = "SUM"
    one: st.SearchStrategy[Any] = _tensors(shape, dtype)
    if name in ("all_reduce", "reduce"):
        values, op = draw(_numeric(size))
        return Step(name, values, root, op, group)
    if name == "barrier":
        one = st.none()
    elif name in ("all_reduce_", "broadcast_", "reduce_scatter"):
        op = draw(st.sampled_from(_OPS))
        if name == "reduce_scatter":
            one = _tensors((count * draw(st.integers(1, 2)), *shape), dtype)
    elif name == "all_to_all" and draw(st.booleans()):
        one = _tensors((count * 2, *shape), dtype)
    elif name in ("scatter", "all_to_all"):
        one = st.lists(_values, min_size=count, max_size=count)
    elif draw(st.booleans()):
        one = _values
    return Step(name, draw(_each(size, one)), root, op, group)


@st.composite
def large_steps(draw: st.DrawFn, size: int, group: tuple[int, ...] | None = None) -> Step:
    """Draw a call on a tensor that rides the data plane, in one block or several."""
    reductions = ["all_reduce", "all_reduce_", "reduce", "reduce_scatter"]
    name = draw(st.sampled_from([*reductions, "broadcast_", "all_gather", "all_to_all"]))
    shape = (draw(st.sampled_from([_LARGE, _LARGE, _LARGER])),)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "uint8"]))
    one = st.integers(0, 9).map(lambda least: Filled((least, 7, least + 1), dtype, shape))
    root, op = draw(st.sampled_from(group or range(size))), draw(st.sampled_from(_SIMPLE))
    return Step(name, draw(_each(size, one)), root, op, group)


def programs(size: int, longest: int = 6) -> st.SearchStrategy[list[Step]]:
    """Draw programs of right calls for `size` ranks."""
    return st.lists(steps(size), min_size=1, max_size=longest)


# Tensors


def _in_form(name: str, value: Any, size: int) -> Any:
    """Return a value as the call of a name takes it."""
    if name.endswith("dict"):
        return {"a": value}
    if name == "scatter":
        return [value] * size
    return [value] if name.endswith(("_params", "_grads", "in a list")) else value


def _call(name: str) -> str:
    return name.removesuffix(" in a dict").removesuffix(" in a list")


@st.composite
def odd_tensors(draw: st.DrawFn, size: int, kinds: tuple[str, ...]) -> Step:
    """Draw a call with a tensor of an odd kind on some ranks, and plain ones on the others.

    One without memory is refused or carried whole; any other counts as the plain one it shows.
    """
    names = [*BASIC, "all_gather in a list", "all_reduce in a dict", "all_reduce_params"]
    name = draw(st.sampled_from([*names[1:], "broadcast_params", "reduce_dict"]))
    kind, ranks = draw(st.sampled_from(kinds)), draw(some_of(size))
    numel = draw(st.sampled_from([12, 12, 12, _LARGE]))
    values = [Odd(kind, numel, rank, rank in ranks) for rank in range(size)]
    root = draw(st.integers(0, size - 1))
    call, is_in_place = _call(name), name.endswith(("_", "_params"))
    ends = "right"
    if kind in WITHOUT_MEMORY and (call not in ("broadcast", "scatter") or root in ranks):
        is_whole = name == "reduce_dict" and kind == "dtensor" and len(ranks) == size
        is_moved = call in ("all_gather", "gather", "broadcast", "scatter")
        ends = "either" if is_moved or is_whole else "refused"
    elif is_in_place and kind in IN_PLACE_REFUSED:
        ends = "refused"
    elif is_in_place and kind == "inference":
        ends = "either"
    return Step(
        call,
        tuple(_in_form(name, value, size) for value in values),
        root,
        "sum" if name in ("all_reduce_params", "reduce_dict") else "SUM",
        is_async=call in BASIC and draw(st.booleans()),
        ends=ends,
    )


@st.composite
def overlaps(draw: st.DrawFn, size: int) -> Step:
    """Draw a call on a list of tensors that share memory on some ranks.

    Each element is reduced once, or all ranks refuse: where the copies on other ranks differ,
    no rank can have one result for both.
    """
    names = ["all_reduce_params", "all_reduce_params in a dict", "all_reduce_grads"]
    name = draw(st.sampled_from([*names, "broadcast_params", "mm.all_reduce_params"]))
    is_large, is_torn = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    dtypes = ["float32", "float64"] if is_large else ["float32", "bfloat16", "float64"]
    dtypes += [] if name == "all_reduce_grads" else ["int64"] if is_large else ["int8", "int64"]
    dtype, numel = draw(st.sampled_from(dtypes)), 300_000 if is_large else 24
    how, ranks = draw(st.sampled_from(sorted(OVERLAPS))), draw(some_of(size))
    options: Any = st.sampled_from([(), (("coalesce", False),), (("bucket_size_mb", 1),)])
    ends = "right" if how in APART else "either"
    if is_torn and how not in APART and len(ranks) < size:
        ends = "refused"
    return Step(
        _call(name),
        tuple(
            Overlap(how, numel, dtype, rank, rank not in ranks, is_torn, "dict" in name)
            for rank in range(size)
        ),
        draw(st.integers(0, size - 1)),
        draw(st.sampled_from(["sum", "mean", "max"])),
        options=() if name == "broadcast_params" else draw(options),
        ends=ends,
    )


# Means, and numbers at their limits

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")
_INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")


def _numbers_of(name: str) -> st.SearchStrategy[Any]:
    dtype: torch.dtype = getattr(torch, name)
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        real = _numbers_of(str(dtype.to_real()).removeprefix("torch.")).filter(math.isfinite)
        return st.builds(complex, real, real)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        numbers = [info.max * x for x in (1.0, 0.9, 0.5, -1.0, -0.7, 1 / 3)]
        numbers += [0.0, 1.0, 3.0, 0.1, info.tiny, info.smallest_normal * info.eps]
        numbers = torch.tensor(numbers, dtype=dtype).tolist()
        return st.sampled_from([*numbers, float("inf"), float("nan")])
    whole = torch.iinfo(dtype)
    near = [whole.max, whole.max - 1, whole.min, whole.min + 2, whole.max // 2, whole.max // 3 * 2]
    return st.sampled_from([*near, 0, 1, 3, 100])


@st.composite
def means(draw: st.DrawFn, size: int) -> Step:
    """Draw a mean of numbers or tensors: near to the true one, or refused where it is of integers.

    One of integers may be refused in a place of theirs, and one of bools anywhere.
    """
    names = ["all_reduce", "all_reduce in a dict", "reduce_mean"]
    is_of_tensors = draw(st.integers(0, 3)) > 0
    if is_of_tensors:
        names += ["all_reduce_", "reduce", "reduce_scatter", "reduce_dict", "all_reduce_params"]
        names += ["all_reduce_grads", "mm.all_reduce", "mm.all_reduce_dict", "mm.all_reduce_params"]
    name = draw(st.sampled_from(names))
    if is_of_tensors:
        others = () if name == "all_reduce_grads" else (*_INTEGERS, "bool")
        dtype = draw(st.sampled_from((*_FLOATS, *_COMPLEX, *others)))
        rows = st.tuples(*[_numbers_of(dtype)] * 2)
        given: Any = draw(rows.map(lambda row: (row,) * size) | _each(size, rows))
        numel = draw(st.sampled_from([2, 2, 2, 2 * _LARGE]))
        numel *= size if name == "reduce_scatter" else 1
        values = [Filled(row, dtype, (numel,)) for row in given]
    else:
        limits = st.sampled_from([2**63 - 1, -(2**63), 2**62])
        floats, whole = _numbers_of("float64"), st.integers(-(2**63), 2**63 - 1) | limits
        one = st.sampled_from([whole, floats, st.booleans(), _numbers_of("complex128")])
        mixed = st.integers(-9, 9) | floats
        values = list(draw(_each(size, draw(one | st.just(mixed)))))
        given = [(value,) for value in values]
    is_plain = _call(name) in BASIC
    return Step(
        _call(name),
        tuple(_in_form(name, value, size) for value in values),
        draw(st.integers(0, size - 1)),
        draw(st.sampled_from(["AVERAGE", "MEAN", "mean"])) if is_plain else "mean",
        is_async=is_plain and draw(st.booleans()),
        ends="either" if _may_be_refused(name, given, is_of_tensors) else "right",
        is_near=True,
    )


def _may_be_refused(name: str, given: Any, is_of_tensors: bool) -> bool:
    numbers = [x for row in given for x in row]
    if any(isinstance(x, bool) for x in numbers):
        return True
    if not is_of_tensors or not all(isinstance(x, int) for x in numbers):
        return False
    is_whole = all(sum(column) % len(given) == 0 for column in zip(*given, strict=True))
    is_exact = name == "all_reduce_params" and is_whole
    return name not in ("reduce_mean", "reduce_dict") and not is_exact


_LIMITS: dict[str, list[Any]] = {
    "int": [2**63 - 1, -(2**63), 2**62, 0, -1, 2**53 + 1],
    "float": [
        *(1.7e308, -1.7e308, 5e-324, -0.0, 0.0, float("inf"), float("-inf"), float("nan")),
        1e308,
    ],
}


@st.composite
def limits(draw: st.DrawFn, size: int) -> Step:
    """Draw a reduction of numbers at their limits, or of tensors: there whole ones wrap."""
    root, ops, names = draw(st.integers(0, size - 1)), list(_OPS), ["all_reduce", "reduce"]
    one: st.SearchStrategy[Any]
    if draw(st.booleans()):
        one = st.sampled_from(_LIMITS[draw(st.sampled_from(sorted(_LIMITS)))])
    else:
        names += ["all_reduce_"]
        dtype = draw(st.sampled_from([*_INTEGERS, *_FLOATS]))
        ops = ["MIN", "MAX"] if dtype in _FLOATS else [*_OPS, "XOR"]
        shape = (3 * draw(st.sampled_from([1, 1, 1, _LARGE])),)
        one = st.tuples(*[_numbers_of(dtype)] * 3).map(lambda row: Filled(row, dtype, shape))
    name = draw(st.sampled_from(names))
    return Step(name, draw(_each(size, one)), root, draw(st.sampled_from(ops)))


# What is refused


def _ones(*shape: int, dtype: str = "float32") -> Filled:
    return Filled((1,), dtype, shape)


_MISFITS: tuple[tuple[Any, Any], ...] = (
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
    (1, _ones(1)),
    (1, "text"),
    (1, None),
    (1.0, Fraction(1, 3)),
    (1, np.ones(3)),
    (1.0, np.longdouble("1.00000000000000000011")),
    (_ones(2), _ones(3)),
    (_ones(2), _ones(2, dtype="float64")),
    (_ones(2), _ones(2, 1)),
    (_ones(_LARGE), _ones(3)),
    (_ones(_LARGE), _ones(_LARGE, dtype="int32")),
    ({"a": _ones(2)}, {"a": _ones(3)}),
    ({"a": _ones(2)}, {"a": 1.0}),
    (Point(1, 2), {"x": 1, "y": 2}),
    (Point(1, 2), Point(1, (2,))),
)


@st.composite
def misfits(draw: st.DrawFn, size: int) -> Step:
    """Draw a reduction of values of which one rank's doesn't fit to the others'."""
    right, wrong = draw(st.sampled_from(_MISFITS))
    victim, root = draw(_each(2, st.integers(0, size - 1)))
    values = tuple(wrong if rank == victim else right for rank in range(size))
    return Step(draw(st.sampled_from(["all_reduce", "reduce"])), values, root, ends="refused")


@st.composite
def raising_values(draw: st.DrawFn, size: int) -> Step:
    """Draw a call in which one rank's value raises while it is written or read."""
    kind, victim = draw(st.sampled_from(sorted(RAISING))), draw(st.integers(0, size - 1))
    names = ["all_reduce", "all_reduce in a dict", "reduce", "reduce_dict", "reduce_mean"]
    names += ["all_gather"]
    if kind in ("reduce", "a list of reduce", "recursion", "depth") or kind.startswith("opens"):
        names += ["gather", "broadcast", "scatter", "all_to_all"]
        names += ["broadcast_params", "all_reduce_params"]
    name = draw(st.sampled_from(names))

    def value(rank: int) -> Any:
        one: Any = Raises(kind, victim) if rank == victim else 1
        if name == "all_reduce_params":
            return [_ones(1), _ones(1) if one == 1 else one]
        if name == "broadcast_params":
            return {"a": one, "b": _ones(1)}
        return [one] * size if name == "all_to_all" else _in_form(name, one, size)

    is_opened = kind == "opens badly elsewhere" and "reduce" not in name
    return Step(
        _call(name),
        tuple(map(value, range(size))),
        victim,
        "mean" if name in ("reduce_dict", "all_reduce_params") else "SUM",
        is_async=_call(name) in BASIC and draw(st.booleans()),
        ends="reads" if is_opened else "raises",
    )


@st.composite
def calls_too_many(draw: st.DrawFn, size: int) -> CallTooMany:
    """Draw programs with a call too many."""
    names = st.sampled_from(["all_reduce", "all_gather", "broadcast"])
    kind = draw(st.sampled_from(["number", "dict", "tensor", "large"]))

    def step(i: int, name: str) -> Step:
        numbers = [float(10 ** (2 * i) * (rank + 1)) for rank in range(size)]
        if kind in ("tensor", "large"):
            shape = (3 if kind == "tensor" else 120_000,)
            return Step(name, tuple(Filled((each,), "float64", shape) for each in numbers))
        return Step(name, tuple({"a": each} if kind == "dict" else each for each in numbers))

    calls = draw(st.lists(names, min_size=3, max_size=5))
    return CallTooMany(
        tuple(step(i, name) for i, name in enumerate(calls)),
        draw(st.integers(0, len(calls) - 2)),
        step(len(calls), draw(names)),
        draw(st.integers(0, size - 1)),
        draw(st.booleans()),
    )
