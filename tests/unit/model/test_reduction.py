"""What each reduction does to numbers and to tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from unisono.errors import ArgumentError, PayloadError
from unisono.model.reduction import ReduceOp, fold_numbers, fold_tensors, parse_op
from unisono.testing.cases._law import same

INT64 = st.integers(-(2**63), 2**63 - 1)
PYTHON: dict[ReduceOp, Callable[[list[Any]], Any]] = {
    ReduceOp.SUM: lambda values: reduce(operator.add, values),
    ReduceOp.AVERAGE: lambda values: reduce(operator.add, values) / len(values),
    ReduceOp.PRODUCT: math.prod,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    ReduceOp.AND: lambda values: reduce(operator.and_, values),
    ReduceOp.OR: lambda values: reduce(operator.or_, values),
    ReduceOp.XOR: lambda values: reduce(operator.xor, values),
}


@pytest.mark.parametrize("name", [*ReduceOp.__members__, "MEAN"])
def test_every_name_in_any_case(name: str) -> None:
    op = ReduceOp["AVERAGE" if name == "MEAN" else name]
    mixed = "".join(c if i % 2 else c.lower() for i, c in enumerate(name))
    for spelling in (name, name.lower(), name.title(), mixed, op):
        assert parse_op(spelling) is op
    assert op.is_bitwise == (name in ("AND", "OR", "XOR"))


@pytest.mark.parametrize("name", ["", "SUMM", " sum", "ReduceOp.SUM", None, 1, True, ["SUM"]])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r"unknown reduction .*SUM AVERAGE .*MEAN"):
        parse_op(name)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ReduceOp), st.lists(st.booleans() | INT64, min_size=1, max_size=5))
def test_ints_fold_as_in_python_and_bools_among_them_count_as_ints(
    op: ReduceOp, values: list[int]
) -> None:
    if not all(type(value) is bool for value in values):
        same(fold_numbers(op, values), PYTHON[op]([int(value) for value in values]))


ARITHMETIC = st.sampled_from([op for op in ReduceOp if not op.is_bitwise])


@settings(max_examples=150, deadline=None)
@given(ARITHMETIC, st.lists(st.floats(), min_size=1, max_size=5))
def test_floats_fold_in_rank_order(op: ReduceOp, values: list[float]) -> None:
    wanted = PYTHON[op](values)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if any(math.isnan(value) for value in values):
            wanted = math.nan
        elif wanted == 0:
            signs = [math.copysign(1, value) for value in values if value == 0]
            wanted = math.copysign(0.0, PYTHON[op](signs))
    if op is ReduceOp.AVERAGE and math.isinf(wanted) and not any(map(math.isinf, values)):
        scaled = PYTHON[op]([value / 8 for value in values]) * 8  # no sum of five overflows so
        found = fold_numbers(op, values)
        assert isinstance(found, float)
        assert math.isclose(found, scaled, rel_tol=1e-14), (values, found)
        return
    same(fold_numbers(op, values), wanted)


def test_mixed_kinds_give_the_widest() -> None:
    for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVERAGE):
        assert type(fold_numbers(op, [1, 2.0])) is float
        assert type(fold_numbers(op, [3.0, True])) is float
    assert type(fold_numbers(ReduceOp.MIN, [1, True])) is int
    same(fold_numbers(ReduceOp.SUM, [1, 2.0, 1j]), 3 + 1j)
    same(fold_numbers(ReduceOp.AVERAGE, [1j, 1]), 0.5 + 0.5j)
    same(fold_numbers(ReduceOp.PRODUCT, [1j, 1j]), -1 + 0j)


@pytest.mark.parametrize("values", [[True], [True, False], [False, False], [True, True, True]])
def test_bools_stay_bools(values: list[bool]) -> None:
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.OR):
        same(fold_numbers(op, values), any(values))
    for op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.AND):
        same(fold_numbers(op, values), all(values))
    same(fold_numbers(ReduceOp.XOR, values), sum(values) % 2 == 1)
    with pytest.raises(PayloadError, match=r"bool"):
        fold_numbers(ReduceOp.AVERAGE, values)


def test_what_has_no_meaning_is_refused() -> None:
    for op in (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR):
        for values in ([1.0], [1, 2.0], [True, 1j]):
            with pytest.raises(PayloadError, match=op.name):
                fold_numbers(op, values)
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        with pytest.raises(PayloadError, match=r"complex"):
            fold_numbers(op, [1, 1j])


def test_tensors_fold_in_order_into_new_memory() -> None:
    parts = [torch.tensor([1, 6, -3]), torch.tensor([2, 3, 4]), torch.tensor([3, 5, 5])]
    wanted = {
        "SUM": [6, 14, 6], "PRODUCT": [6, 90, -60], "MIN": [1, 3, -3], "MAX": [3, 6, 5],
        "AND": [0, 0, 4], "OR": [3, 7, -3], "XOR": [0, 0, -4],
    }  # fmt: skip
    for name, values in wanted.items():
        for given_parts in (parts, torch.stack(parts)):
            same(fold_tensors(ReduceOp[name], given_parts), torch.tensor(values))
        alone = fold_tensors(ReduceOp[name], parts[:1])
        same(alone, parts[0])
        assert alone.data_ptr() != parts[0].data_ptr()
    large = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
    same(fold_tensors(ReduceOp.SUM, large), (large[0] + large[1]) + large[2])
