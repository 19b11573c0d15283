"""Hypothesis strategies that draw the steps of random programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tests.support.random_programs import odd_values as odd
from tests.support.random_programs.steps import BASIC, Step
from tests.support.random_programs.values import Filled, Made, Point

_LARGE = 120_000  # elements; as float32, too long for a round of three ranks
_LARGER = 1_200_000  # elements; in most dtypes, longer than a block of shared memory
# Shapes below and above the limit of a round of the control plane (16 KiB).
_SMALL: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (2, 3), (3, 0, 2), (5000,))
_SHAPES = st.sampled_from((*_SMALL, *_SMALL, *[(_LARGE,)] * 4, (_LARGER,)))
_FLOATS = ("float32", "bfloat16", "float64", "float16")
_INEXACT = (*_FLOATS, "complex64", "complex128")
_INTEGERS = ("int64", "int32", "uint8", "int8", "int16", "uint16", "uint32", "uint64")
_EXACT = (*_INTEGERS, "bool")
_BITS = ("AND", "OR", "XOR")
_OPS = ("SUM", "MIN", "MAX", "PRODUCT", *_BITS, "mean")
Values = st.SearchStrategy[Any]


def some_of(size: int, least: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw some or all ranks, in order."""
    ranks = st.sets(st.integers(0, size - 1), min_size=min(least, size))
    return (ranks | st.just(set(range(size)))).map(lambda found: tuple(sorted(found)))


def _in_form(name: str, value: Any, size: int) -> Any:
    """Return a value in the form that a call takes."""
    if name == "broadcast_params in a dict":
        return {"a": value, "b": _ones(1)}
    if name.endswith("dict"):
        return {"a": value}
    if name in ("scatter in a list", "all_to_all in a list"):
        return [value] * size
    return [value] if name.endswith(("_params", "_grads", "in a list")) else value


def _step(
    draw: st.DrawFn,
    name: str,
    values: Sequence[Any],
    ends: str | Callable[[str, int], str] = "right",
    *,
    group: tuple[int, ...] | None = None,
    **more: Any,
) -> Step:
    """Draw the rest of a call; `ends` is its end, or returns the end for call and root."""
    call = name.removesuffix(" in a dict").removesuffix(" in a list")
    drawn = {"op": "sum", "root": draw(st.sampled_from(group or range(len(values)))), **more}
    if "is_async" not in drawn:
        drawn["is_async"] = call in BASIC and draw(st.booleans())
    values = tuple(_in_form(name, value, len(values)) for value in values)
    end = ends if isinstance(ends, str) else ends(call, drawn["root"])
    return Step(call, values, group=group, ends=end, **drawn)


# Values

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
_small = st.sampled_from(_SMALL).map(lambda shape: Filled((1, 2), "int64", shape))
_leaf = _plain | _objects | _small
_values = (
    _plain
    | _objects
    | st.lists(_leaf, max_size=3)
    | st.dictionaries(st.text(max_size=3), _leaf, max_size=3)
    | st.tuples(_leaf, _leaf)
    | st.sampled_from([Made(mul, ("é", 40_000)), Made(mul, (b"\0", 200_000))])
)


@cache
def _limits_of(name: str) -> Values:
    dtype: torch.dtype = getattr(torch, name)
    if dtype is torch.bool:
        return st.booleans()
    if dtype.is_complex:
        real = _limits_of(str(dtype.to_real()).removeprefix("torch.")).filter(math.isfinite)
        return st.builds(complex, real, real)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        numbers = [info.max * x for x in (1.0, 0.9, 0.5, -1.0, -0.7, 1 / 3)] * 2
        numbers += [0.0, -0.0, 1.0, 3.0, 0.1, info.tiny, info.smallest_normal * info.eps]
        numbers = torch.tensor(numbers, dtype=dtype).tolist()
        return st.sampled_from([*numbers, math.inf, -math.inf, math.nan])
    whole = torch.iinfo(dtype)
    near = [whole.max, whole.max - 1, whole.min, whole.min + 2, whole.max // 2, whole.max // 3 * 2]
    return st.sampled_from([*near, 0, 1, 3, 100])


def _tensors(shape: tuple[int, ...], dtype: str, op: str = "SUM") -> Values:
    """Draw tensors that `op` reduces exactly in every order, except for a mean's rounding."""
    if dtype in _EXACT or op in ("MIN", "MAX", "mean"):  # integers wrap around
        row: Values = st.tuples(*[_limits_of(dtype)] * 3)
    else:
        row = st.integers(1, 3).map(lambda least: (least, least + 1, least + 2))
    return row.map(lambda row: Filled(row[: max(math.prod(shape), 1)], dtype, shape))


def _numbers(op: str, tensor: Values, is_right: bool) -> list[Values]:
    """List strategies for values, besides tensors, that `op` reduces to the same everywhere."""
    small, limits = st.integers(-9, 9), _limits_of("float64")
    kinds: list[Values] = [small | st.integers(-(2**63), 2**63 - 1) | _limits_of("int64")]
    if op == "mean":
        kinds += [limits, limits, small | limits, _limits_of("complex128")]
        return kinds if is_right else [*kinds, st.booleans()]
    if op not in _BITS:
        kinds += [limits, st.floats(-1e6, 1e6)]
    if op in ("SUM", "MIN", "MAX"):
        mixed = lambda a, b, t: {"a": [a, (b,)], "p": Point(t, a)}  # noqa: E731
        kinds.append(st.builds(mixed, small, small, tensor))
    return [*kinds, st.booleans()]


# Right calls


def _rows(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return a similar shape whose rows can be divided among `count` ranks."""
    first, *rest = shape or (1,)
    return (max(first // count, 1) * count, *rest)


@st.composite
def reductions(
    draw: st.DrawFn, /, size: int, names: Sequence[str], *, is_right: bool = True, **more: Any
) -> Step:
    """Draw a reduction of numbers at their limits, or of tensors.

    A mean of integers is refused if its result would have to be integers, and a mean of bools may
    always be refused; neither counts as right.
    """
    name, op = draw(st.sampled_from(names)), draw(st.sampled_from(_OPS if is_right else _OPS[-1:]))
    dtypes: tuple[str, ...] = _EXACT if op in _BITS else (*_FLOATS, *_FLOATS, *_EXACT)
    if op not in (*_BITS, "MIN", "MAX"):
        dtypes = _INEXACT if is_right and op == "mean" else (*_INEXACT, *_EXACT)
    dtype = draw(st.sampled_from(_INEXACT if name == "all_reduce_grads" else dtypes))
    shape, count = draw(_SHAPES), len(more.get("group") or range(size))
    shape = _rows(shape, count) if name == "reduce_scatter" else shape
    kinds = [_tensors(shape, dtype, op)] * 3
    if name in ("all_reduce", "reduce", "all_reduce in a dict", "reduce_mean"):
        kinds += _numbers(op, kinds[0], is_right)
    one = draw(st.sampled_from(kinds))
    alike, each = one.map(lambda value: (value,) * size), st.tuples(*[one] * size)
    values = draw(alike | each if op == "mean" else each)

    def ends(call: str, root: int) -> str:
        is_tensor = isinstance(values[0], Filled)
        is_bool = dtype == "bool" if is_tensor else any(isinstance(x, bool) for x in values)
        if op != "mean" or (not is_bool and (not is_tensor or dtype in _INEXACT)):
            return "right"
        if is_bool or call.startswith("mm."):
            return "either"
        columns = zip(*(value.row for value in values), strict=True)
        is_whole = 0 in shape or all(sum(column) % size == 0 for column in columns)
        is_exact = call == "all_reduce_params" and is_whole and dtype != "uint64"
        return "right" if is_exact or call in ("reduce_mean", "reduce_dict") else "refused"

    return _step(draw, name, values, ends, op=op, is_near=op == "mean", **more)


@st.composite
def steps(draw: st.DrawFn, size: int, group: tuple[int, ...] | None = None) -> Step:
    """Draw a right call of `size` ranks, over a group of any ranks if none is given."""
    if group is None and draw(st.booleans()):
        group = tuple(draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True)))
    name, count = draw(st.sampled_from(BASIC)), len(group or range(size))
    if "reduce" in name:
        return draw(reductions(size, [name], group=group, is_async=False))
    shape, dtype = draw(_SHAPES), draw(st.sampled_from((*_INEXACT, *_EXACT)))
    tensor, lists = _tensors(shape, dtype), st.lists(_values, min_size=count, max_size=count)
    kinds: dict[str, list[Values]] = {
        "barrier": [st.none()],
        "broadcast_": [tensor],
        "scatter": [lists],
        "all_to_all": [lists, _tensors(_rows(shape, count), dtype)],
    }
    one = draw(st.sampled_from(kinds.get(name, [tensor, _values])))
    return _step(draw, name, draw(st.tuples(*[one] * size)), group=group, is_async=False)


def programs(size: int, longest: int = 6) -> st.SearchStrategy[list[Step]]:
    """Draw programs of right calls for `size` ranks."""
    return st.lists(steps(size), min_size=1, max_size=longest)


def means(size: int) -> st.SearchStrategy[Step]:
    """Draw a mean, right or refused, by any call."""
    names = ["all_reduce", "all_reduce_", "reduce", "reduce_scatter", "all_reduce in a dict"]
    names += ["reduce_mean", "reduce_dict", "all_reduce_params", "all_reduce_grads"]
    names += ["mm.all_reduce", "mm.all_reduce_dict", "mm.all_reduce_params"]
    return reductions(size, names, is_right=False)


# Tensors that are more, or less, than a piece of memory


@st.composite
def odd_tensors(draw: st.DrawFn, size: int, kinds: Sequence[str]) -> Step:
    """Draw a call with a tensor of an odd kind on some ranks, and plain ones on the others.

    A tensor without memory is refused or sent as an object; any other is treated as the plain
    tensor with its values.
    """
    names = {*BASIC, "all_gather in a list", "all_reduce in a dict", "all_reduce_params"}
    names |= {"broadcast_params", "reduce_dict", "scatter in a list"}
    kind, ranks = draw(st.sampled_from(kinds)), draw(some_of(size))
    if kind in odd.IN_PLACE_REFUSED:
        names = {"all_reduce_", "broadcast_", "all_reduce", "all_gather", "broadcast_params"}
    name = draw(st.sampled_from(sorted(names - {"barrier", "scatter"})))
    numel = draw(st.sampled_from([12, 12, 12, _LARGE]))

    def ends(call: str, root: int) -> str:
        is_in_place = call.endswith(("_", "_params"))
        if kind in odd.WITHOUT_MEMORY and (call not in ("broadcast", "scatter") or root in ranks):
            is_whole = call == "reduce_dict" and kind == "dtensor" and len(ranks) == size
            is_moved = call in ("all_gather", "gather", "broadcast", "scatter")
            return "either" if is_moved or is_whole else "refused"
        if is_in_place and kind in odd.IN_PLACE_REFUSED:
            return "refused"
        return "either" if is_in_place and kind == "inference" else "right"

    values = [Made(odd.tensor, (kind, numel, rank, rank in ranks)) for rank in range(size)]
    return _step(draw, name, values, ends)


@st.composite
def overlaps(draw: st.DrawFn, size: int) -> Step:
    """Draw a call on a list of tensors that share memory on some ranks.

    Each element is reduced once, or all ranks refuse: if the copies on other ranks differ, memory
    that is shared can't have both results.
    """
    how, ranks = draw(st.sampled_from(sorted(odd.OVERLAPS))), draw(some_of(size))
    numel, is_dict = draw(st.sampled_from([24, 300_000])), draw(st.booleans())
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float64", "int8", "int64"]))
    names = ["all_reduce_params"]
    if not is_dict:
        names += ["broadcast_params", "mm.all_reduce_params"]
        names += ["all_reduce_grads"] if dtype in _FLOATS else []
    name, torn = draw(st.sampled_from(names)), draw(st.sampled_from([0, 0, 0, 6]))
    values = [
        Made(odd.overlapping, (how, numel, dtype, rank, rank not in ranks, torn, is_dict))
        for rank in range(size)
    ]
    options: Any = st.sampled_from([(), (("coalesce", False),), (("bucket_size_mb", 1),)])
    ends = "right" if how in odd.APART else "either"
    if torn and how not in odd.APART and len(ranks) < size:
        ends = "refused"
    root, op = draw(st.integers(0, size - 1)), draw(st.sampled_from(["sum", "mean", "max"]))
    options = () if name == "broadcast_params" else draw(options)
    return Step(name, tuple(values), root, op, options=options, ends=ends)


# What is refused


def _ones(*shape: int, dtype: str = "float32") -> Filled:
    return Filled((1,), dtype, shape)


_MISFITS: tuple[tuple[Any, Any], ...] = (
    ({"a": 1}, {"a": 2**70}),
    ({"a": 1}, {"b": 1}),
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
    (Point(1, 2), Point(1, (2,))),
)


@st.composite
def misfits(draw: st.DrawFn, size: int) -> Step:
    """Draw a reduction in which the value of one rank doesn't match those of the others."""
    (right, wrong), victim = draw(st.sampled_from(_MISFITS)), draw(st.integers(0, size - 1))
    values = [wrong if rank == victim else right for rank in range(size)]
    return _step(draw, draw(st.sampled_from(["all_reduce", "reduce"])), values, "refused")


@st.composite
def raising_values(draw: st.DrawFn, size: int) -> Step:
    """Draw a call in which one rank's value raises while it is written or read."""
    kind, victim = draw(st.sampled_from(sorted(odd.RAISING))), draw(st.integers(0, size - 1))
    names = ["all_reduce", "all_reduce in a dict", "reduce", "reduce_dict", "reduce_mean"]
    names += ["all_gather"]
    if kind in ("reduce", "recursion", "depth") or kind.startswith("opens"):
        names += ["gather", "broadcast", "scatter in a list", "all_to_all in a list"]
        names += ["broadcast_params in a dict", "all_reduce_params"]
    name = draw(st.sampled_from(names))
    one: Any = _ones(1) if name == "all_reduce_params" else 1
    values = [Made(odd.raising, (kind, rank)) if rank == victim else one for rank in range(size)]
    is_opened = kind == "opens badly elsewhere" and "reduce" not in name
    return _step(draw, name, values, "reads" if is_opened else "raises", root=victim)


@st.composite
def calls_too_many(draw: st.DrawFn, size: int) -> tuple[list[list[Step]], Step, bool]:
    """Draw each rank's calls, of which one rank makes one more than the others.

    Also returns that call, and whether the call after it is of the same function.
    """
    names = st.sampled_from(["all_reduce", "all_gather", "broadcast"])
    kind = draw(st.sampled_from(["number", "dict", "tensor", "large"]))
    is_async = draw(st.booleans())

    def step(i: int, name: str) -> Step:
        values: list[Any] = [float(10 ** (2 * i) * (rank + 1)) for rank in range(size)]
        if kind in ("tensor", "large"):
            shape = (3 if kind == "tensor" else _LARGE,)
            values = [Filled((each,), "float64", shape) for each in values]
        elif kind == "dict":
            values = [{"a": each} for each in values]
        return Step(name, tuple(values), is_async=is_async, line=i)

    calls = [step(i, name) for i, name in enumerate(draw(st.lists(names, min_size=3, max_size=5)))]
    at, extra = draw(st.integers(0, len(calls) - 2)), step(len(calls), draw(names))
    victim = draw(st.integers(0, size - 1))
    of_ranks = [
        [*calls[:at], extra, *calls[at:]] if rank == victim else calls for rank in range(size)
    ]
    return of_ranks, extra, extra.call == calls[at].call
