"""What travels in the guise of another type comes to what python itself computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
import sympy  # type: ignore[import-untyped]
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import unisono as idist
from unisono.collectives import _dtype_emulation as emulation
from unisono.context import ContextState
from unisono.errors import PayloadError
from unisono.model.reduction import ReduceOp, fold_numbers, fold_tensors
from unisono.models.serial import SerialModel
from unisono.testing.cases._law import same

INTEGERS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
EXACT = [op for op in ReduceOp if op is not ReduceOp.AVERAGE]
STEPS: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.AND: operator.and_,
    ReduceOp.OR: operator.or_,
    ReduceOp.XOR: operator.xor,
}


def disguised(parts: list[Tensor], op: ReduceOp) -> Tensor:
    """Reduce as a model would that has none of the dtypes."""
    emulated = [emulation._emulate(part.clone(), op, len(parts)) for part in parts]
    steps = {step for _, step, _ in emulated}
    assert len(steps) == 1
    assert ReduceOp.AVERAGE not in steps
    return emulated[0][2](fold_tensors(steps.pop(), [converted for converted, _, _ in emulated]))


def wrapped(value: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return int((value - info.min) % 2**info.bits + info.min)


def ints(dtype: torch.dtype) -> st.SearchStrategy[int]:
    info = torch.iinfo(dtype)
    edges = [info.min, info.min + 1, 0, 1, info.max // 2 + 1, info.max - 1, info.max]
    return st.sampled_from(edges) | st.integers(info.min, info.max)


Columns = tuple[torch.dtype, list[list[Any]]]


def columns_of(
    dtypes: list[torch.dtype], values: Callable[[torch.dtype], st.SearchStrategy[Any]]
) -> st.SearchStrategy[Columns]:
    """Give a dtype and columns: for each place of a tensor, a value for each of 1 to 4 ranks."""

    def lists(dtype: torch.dtype, n: int) -> st.SearchStrategy[list[list[Any]]]:
        return st.lists(st.lists(values(dtype), min_size=n, max_size=n), min_size=1, max_size=4)

    drawn = st.tuples(st.sampled_from(dtypes), st.integers(1, 4))
    return drawn.flatmap(lambda each: st.tuples(st.just(each[0]), lists(*each)))


def rows(columns: list[list[Any]], dtype: torch.dtype) -> list[Tensor]:
    return [torch.tensor(list(row), dtype=dtype) for row in zip(*columns, strict=True)]


@settings(max_examples=200, deadline=None)
@given(columns_of(INTEGERS, ints))
def test_integers_wrap_as_their_type_does(drawn: Columns) -> None:
    dtype, columns = drawn
    for op in EXACT:
        total = [wrapped(reduce(STEPS[op], column), dtype) for column in columns]
        same(disguised(rows(columns, dtype), op), torch.tensor(total, dtype=dtype))


@pytest.mark.parametrize("op", EXACT, ids=lambda op: op.name)
def test_bools_are_bits(op: ReduceOp) -> None:
    for size in (1, 2, 3, 256, 257):
        for true in (0, 1, size // 2, size - 1, size):
            column = [True] * true + [False] * (size - true)
            wanted = {
                "SUM": any(column), "MAX": any(column), "OR": any(column), "PRODUCT": all(column),
                "MIN": all(column), "AND": all(column), "XOR": true % 2 == 1,
            }[op.name]  # fmt: skip
            same(disguised(rows([column], torch.bool), op), torch.tensor([wanted]))


def floats(dtype: torch.dtype) -> st.SearchStrategy[float]:
    info = torch.finfo(dtype)
    special = [0.0, -0.0, math.nan, info.max, info.min, info.tiny, -info.tiny, 1.0, -1.0]
    if not str(dtype).endswith(("fn", "fnuz")):
        special += [math.inf, -math.inf]
    plain = st.floats(info.min, info.max)
    return st.sampled_from(special) | plain


def least(column: list[float], op: ReduceOp) -> float:
    """Do what IEEE 754-2019 calls minimum and maximum."""
    if any(math.isnan(value) for value in column):
        return math.nan
    choose = min if op is ReduceOp.MIN else max
    return choose(column, key=lambda value: (value, math.copysign(1, value)))


def agree(found: Tensor, wanted: Tensor) -> None:
    """Demand the same bits, but for NaN, which has many."""
    assert found.dtype is wanted.dtype
    nan = wanted.double().isnan()
    assert torch.equal(found.double().isnan(), nan)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.itemsize]
    assert torch.equal(found.view(width)[~nan], wanted.view(width)[~nan])


@settings(max_examples=400, deadline=None)
@given(columns_of(FLOATS, floats))
def test_the_order_of_floats(drawn: Columns) -> None:
    dtype, columns = drawn
    parts = rows(columns, dtype)
    columns = [[float(part[i].double()) for part in parts] for i in range(len(columns))]
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        wanted = torch.tensor([least(column, op) for column in columns], dtype=torch.float64)
        agree(disguised(parts, op), wanted.to(dtype))


@settings(max_examples=300, deadline=None)
@given(columns_of(FLOATS, floats))
def test_narrow_floats_are_computed_in_float32_and_rounded_once(drawn: Columns) -> None:
    dtype, columns = drawn
    parts = rows(columns, dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVERAGE):
        step = torch.mul if op is ReduceOp.PRODUCT else torch.add
        # A mean is that of halves, quarters and so on: their sum overflows nowhere.
        scale = 0.5 ** (len(parts) - 1).bit_length() if op is ReduceOp.AVERAGE else 1.0
        total = reduce(step, [part.to(wide) * scale for part in parts])
        if op is ReduceOp.AVERAGE:
            # The rounding of float8 and float16 comes after the division, never before it.
            total = total / (len(parts) * scale)
        agree(disguised(parts, op), total.to(dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVERAGE])
def test_complex_numbers(dtype: torch.dtype, op: ReduceOp) -> None:
    values = [[1 + 2j, -0.5j, 3 + 0j], [2 - 1j, 1j, 1j], [0.5 + 0j, -2 + 0j, 4 - 4j]]
    parts = rows(values, dtype)
    wanted = reduce(STEPS[op] if op is not ReduceOp.AVERAGE else operator.add, parts)
    if op is ReduceOp.AVERAGE:
        wanted = wanted / 3
    assert torch.allclose(disguised(parts, op), wanted, rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0, 3)])
def test_shapes_stay(shape: tuple[int, ...]) -> None:
    for dtype in (torch.bool, *INTEGERS, *FLOATS, torch.complex64):
        tensor = torch.ones(shape).to(dtype)
        ops = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
        for op in ops[: 2 if dtype.is_complex else 4]:
            total = disguised([tensor, tensor], op)
            assert (total.shape, total.dtype) == (tensor.shape, dtype)


def test_movement_of_every_dtype_and_back() -> None:
    context = ContextState(SerialModel())
    for dtype in (torch.bool, *INTEGERS, *FLOATS, torch.complex64, torch.complex128):
        for shape in ((), (0,), (3,), (2, 3)):
            tensor = torch.randint(2, shape).to(dtype)
            movable, restore = emulation.as_movable(context.model, tensor)
            assert movable.dtype in context.model.dtypes
            same(restore(movable), tensor)
            same(restore(torch.stack([movable, movable])), torch.stack([tensor, tensor]))


def test_our_own_copy_is_contiguous_and_new() -> None:
    context = ContextState(SerialModel())
    base = torch.arange(12.0).reshape(3, 4)
    cases = [base, base.t(), base[:, ::2], base[1:], base[0, 0], base[:0], base.requires_grad_()]
    cases += [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(1).expand(3, 2)]
    for tensor in cases:
        mine = emulation.private_copy(context, tensor)
        assert mine.is_contiguous()
        assert not mine.requires_grad
        assert not mine.is_conj()
        same(mine, tensor.detach().resolve_conj())
        if tensor.numel():
            start = tensor.untyped_storage().data_ptr()
            end = start + tensor.untyped_storage().nbytes()
            assert not start <= mine.data_ptr() < end


def test_what_has_no_meaning_is_refused() -> None:
    refused = [
        (torch.ones(1), ReduceOp.AND, "integer and bool"),
        (torch.ones(1, dtype=torch.complex64), ReduceOp.XOR, "integer and bool"),
        (torch.ones(1, dtype=torch.complex64), ReduceOp.MIN, "isn't defined"),
        (torch.ones(1, dtype=torch.int32), ReduceOp.AVERAGE, "fraction"),
        (torch.ones(1, dtype=torch.bool), ReduceOp.AVERAGE, "fraction"),
        (torch.eye(2).to_sparse(), ReduceOp.SUM, "to_dense"),
        (torch.empty(1, device="meta"), ReduceOp.SUM, "dense"),
    ]
    for tensor, op, text in refused:
        with pytest.raises(PayloadError, match=text):
            emulation.check_reducible(tensor, op)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32), min_size=2, max_size=6))
def test_numbers_and_tensors_have_one_order(values: list[float]) -> None:
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        parts = [torch.tensor(value, dtype=torch.float64) for value in values]
        same(disguised(parts, op).item(), fold_numbers(op, values))


@pytest.mark.parametrize("kind", [np.longdouble, sympy.Float])
def test_numbers_that_a_double_would_round_are_refused(kind: Any) -> None:
    wide = sympy.Float("0.1", 50) if kind is sympy.Float else 1 + np.longdouble(2) ** -60
    for value in (wide, {"loss": wide}):
        with pytest.raises(PayloadError, match="rank 0: .*doesn't fit into a float"):
            idist.all_reduce(value)
    same(idist.all_reduce(kind(0.5)), 0.5)
    same(idist.all_reduce(np.longdouble("nan")), math.nan)
