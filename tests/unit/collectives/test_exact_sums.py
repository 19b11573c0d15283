"""Sums by limbs are those of fractions, for every dtype, order, span and number of summands."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import unisono as idist
from unisono.collectives import _exact_sums
from unisono.collectives._exact_sums import FORMATS, Layout, Span, add, layout, rounded, span
from unisono.testing.cases._law import same
from unisono.testing.cases.sums import correctly_rounded, rough

DTYPES = list(FORMATS)
_WIDTHS = {2: "<h", 4: "<i", 8: "<q"}


def limbs_of(parts: list[Tensor], count: int = 0) -> tuple[Tensor, Layout | None]:
    """Add the terms of several ranks, each [k, n]."""
    dtype = parts[0].dtype
    count = count or sum(len(part) for part in parts)
    plan = layout(Span.of_all(map(span, parts)), dtype, count)
    if plan is None:
        return torch.zeros(0), None
    return torch.stack([add(part, plan) for part in parts]).sum(0), plan


def total(parts: list[Tensor], count: int = 0) -> Tensor:
    limbs, plan = limbs_of(parts, count)
    if plan is None:
        return torch.zeros(parts[0].shape[1], dtype=parts[0].dtype)
    return rounded(limbs, plan, parts[0].dtype)


def due(terms: Tensor) -> Tensor:
    columns = terms.double().T.tolist()
    sums = [correctly_rounded(column, terms.dtype) for column in columns]
    rounded_once = torch.tensor(sums, dtype=torch.float64).to(terms.dtype)
    return rounded_once.masked_fill(rounded_once.isnan(), math.nan)


def any_bits(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make numbers of all bit patterns alike: every exponent, NaN and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(FORMATS[dtype].bits)
    drawn = torch.randint(info.min, info.max, shape, generator=generator)
    return drawn.to(FORMATS[dtype].bits).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_bits_at_all(dtype: torch.dtype, count: int) -> None:
    terms = any_bits(count, (count, 300), dtype)
    terms[:, :150] = torch.where(terms[:, :150].isfinite(), terms[:, :150], 0.0)
    same(total(list(terms.unsqueeze(1))), due(terms))
    same(total([terms]), due(terms))
    same(total([terms.flip(0)]), due(terms))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_few_exponents_take_one_or_two_limbs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    terms = torch.randn((4, 200), generator=generator, dtype=torch.float64).to(dtype)
    terms[2:] = -terms[:2]
    terms[3, 100:] += terms[0, 100:] / 64
    limbs, plan = limbs_of([terms])
    assert plan is not None
    assert plan.limbs == (2 if dtype is torch.float64 else 1)
    assert limbs.shape == (plan.rows, 200)
    same(total([terms]), due(terms))
    marked = torch.cat([terms, torch.full((1, 200), -0.0, dtype=dtype)])
    same(total([marked]), due(marked))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(DTYPES), st.data())
def test_sums_that_hypothesis_finds(dtype: torch.dtype, data: st.DataObject) -> None:
    shape, info = _WIDTHS[dtype.itemsize], torch.iinfo(FORMATS[dtype].bits)
    near = [0, info.min, FORMATS[dtype].infinity - 1, 1, 1 << FORMATS[dtype].fraction]
    bits = data.draw(st.lists(st.integers(info.min, info.max) | st.sampled_from(near), min_size=1))
    raw = bytearray(b"".join(struct.pack(shape, each) for each in bits))
    terms = torch.frombuffer(raw, dtype=dtype).view(-1, 1)
    cut = data.draw(st.integers(0, len(bits)))
    same(total([terms[cut:], terms[:cut]]), due(terms))


def in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is quicker for normal numbers."""
    monkeypatch.setattr(_exact_sums, "_are_normal", lambda *_: False)
    monkeypatch.setattr(_exact_sums, "_are_normal_in_double", lambda *_: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("limbs", [1, 2, 3])
def test_a_conversion_rounds_as_the_bits_do(
    dtype: torch.dtype, limbs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = (limbs, 40_000)
    values = torch.randint(-(2**61), 2**61, shape, generator=generator)
    values >>= torch.randint(0, 64, shape, generator=generator)
    halves = ((values >> 36) << 1 | 1) << torch.randint(0, 34, shape, generator=generator)
    alone = values.clone()
    alone[:-1] = torch.randint(-1, 2, shape, generator=generator)[:-1]
    plan = Layout(60, 58, limbs, False)
    assert _exact_sums._are_normal(plan, FORMATS[dtype])
    for each in (values, halves.clamp(-(2**61), 2**61), alone, torch.zeros_like(values)):
        quick = rounded(each.clone(), plan, dtype)
        with monkeypatch.context() as patch:
            in_full(patch)
            same(rounded(each.clone(), plan, dtype), quick)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0, 5, 40, 200])
def test_normal_numbers_are_cut_as_all_are(
    dtype: torch.dtype, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = min(spread, {torch.float16: 5, torch.float64: 200}.get(dtype, 40))
    terms = torch.stack([rough(seed, 200, dtype, spread) for seed in range(5)])
    terms[4, 90:] = -terms[3, 90:]
    quick = total([terms])
    same(quick, due(terms))
    with monkeypatch.context() as patch:
        in_full(patch)
        same(total([terms]), quick)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 1 << 10, 1 << 20, 1 << 40])
def test_any_number_of_summands_has_room(dtype: torch.dtype, count: int) -> None:
    """With a million ranks the limbs are narrower; the sum of their greatest is no overflow."""
    terms = any_bits(5, (3, 80), dtype)
    terms = torch.where(terms.isfinite(), terms, 1.0)
    same(total([terms], max(count, 3)), due(terms))
    most = torch.full((1, 4), torch.finfo(dtype).max, dtype=dtype)
    least = torch.full((1, 4), torch.finfo(dtype).smallest_normal, dtype=dtype)
    plan = layout(Span.of_all([span(most), span(least)]), dtype, count)
    assert plan is not None
    greatest = add(most, plan).abs().max().item()
    assert int(greatest) * count < 2**62
    # That many of the greatest number, but one, are taken away again.
    limbs = add(most, plan) * (count - 1) - add(most, plan) * (count - 1) + add(least, plan)
    same(rounded(limbs, plan, dtype), least[0])


def test_what_the_processor_flushes_to_zero_is_summed() -> None:
    least = torch.finfo(torch.float32).smallest_normal
    terms = torch.tensor([[least], [-least / 2], [least / 4]])
    wanted = torch.tensor([least * 3 / 4])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        got = total([terms])
    finally:
        torch.set_flush_denormal(False)
    same(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_take_no_limbs_unless_one_is_negative(dtype: torch.dtype) -> None:
    zeros = torch.zeros((2, 3), dtype=dtype)
    assert limbs_of([zeros])[1] is None
    assert limbs_of([zeros[:0]])[1] is None
    assert limbs_of([zeros[:, :0]])[1] is None
    same(total([-zeros]), -zeros[0])
    same(total([-zeros[:1], zeros[1:]]), zeros[0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_autograd_may_change_a_result_in_place(count: int, exact: bool) -> None:
    totals = idist.all_reduce([torch.ones(2, 2) for _ in range(count)], exact=exact)
    weight = torch.ones(2, 2, requires_grad=True)
    totals[0] += weight  # refused for an output of torch.split
    assert totals[0].grad_fn is not None
