"""Sums have the same bits on every rank and in every run; exact sums also on every model."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import unisono as idist
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.testing.cases._law import law, raises, same
from unisono.testing.cases.reductions import Metrics

INF, NAN = math.inf, math.nan
# The number of fraction bits, and the exponent of the smallest positive number.
_FORMATS = {
    torch.float16: (10, -24),
    torch.bfloat16: (7, -133),
    torch.float32: (23, -149),
    torch.float64: (52, -1074),
}
FLOATS = tuple(_FORMATS)


def rough(seed: int, count: int, dtype: torch.dtype, spread: int = 20) -> Tensor:
    """Create numbers of both signs and many exponents, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-spread, spread + 1, (count,), generator=generator)
    return torch.ldexp(values, exponents).to(dtype)


def correctly_rounded(column: Sequence[float], dtype: torch.dtype) -> float:
    """Return the sum of fractions, rounded once: a reference without the library's code."""
    # A Fraction can't be infinite or NaN, but float addition handles these correctly.
    if any(not math.isfinite(value) for value in column):
        return sum(column)
    if all(value == 0 and math.copysign(1, value) < 0 for value in column):
        return -0.0  # only a sum of negative zeros keeps the sign
    total = sum(map(Fraction, column), Fraction())
    if total == 0:
        return 0.0
    fraction_bits, least_exponent = _FORMATS[dtype]
    magnitude, sign = abs(total), 1 if total > 0 else -1
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:  # the lengths may differ by one more
        exponent -= 1
    step = Fraction(2) ** max(exponent - fraction_bits, least_exponent)
    nearest = round(magnitude / step) * step  # ties to even
    return sign * (INF if nearest > Fraction(torch.finfo(dtype).max) else float(nearest))


def _expected(parts: Sequence[Tensor]) -> Tensor:
    """Return the exact sum of the ranks' tensors, rounded once."""
    columns = zip(*(part.double().reshape(-1).tolist() for part in parts), strict=True)
    return _sums(list(columns), parts[0].dtype).reshape(parts[0].shape)


def _sums(columns: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return a tensor with the correctly rounded sum of each column."""
    sums = [correctly_rounded(column, dtype) for column in columns]
    total = torch.tensor(sums, dtype=torch.float64).to(dtype)
    return total.masked_fill(total.isnan(), NAN)  # conversions may change the bits of NaN


def _hard(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Create numbers that cancel, lie half-way between floats, or are close to the limits."""
    info = torch.finfo(dtype)
    pairs = [(info.max, -info.max), (1.0, info.eps / 2), (1 + info.eps, info.eps / 2)]
    pairs += [(info.smallest_normal / 4, -info.smallest_normal / 2), (-0.0, -0.0), (-0.0, 0.0)]
    ends = {size - 1: 1, 0: 0}  # rank 0 comes last, so a single rank has the first of each pair
    # Ranks between the first and the last add -0.0, which changes no sum.
    edges = [pair[ends[rank]] if rank in ends else -0.0 for pair in pairs]
    spread = -_FORMATS[dtype][1] // 2
    mine, next_one = (rough(r % size, 60, torch.float64, spread) for r in (rank, rank + 1))
    small = rough(rank, 20, torch.float64, 4) * info.smallest_normal
    near = rough(rank, 40, torch.float64, 2)
    values = [torch.tensor(edges, dtype=torch.float64), mine, mine - next_one, small, near]
    return torch.cat(values).to(dtype)


@law()
def sums_have_the_same_bits_on_every_rank(rank: int, size: int) -> None:
    """The lengths and operations cover every path of sums that are rounded."""
    for count in (5, 3_000, 40_000):  # one frame, a short message and a long message
        totals = []
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            value = rough(rank, count, dtype)
            totals.append(idist.all_reduce(value))
            if dtype is torch.float32:
                totals += [idist.all_reduce(value, "MEAN"), idist.all_reduce(value, "PRODUCT")]
        same(totals, idist.broadcast(totals, src=0), count)
    tree = {"loss": 0.1 * 3**rank, "grads": [rough(rank, 700, torch.float32)]}
    for other in (tree, 0.1 + 1e-9 * rank**3):
        total = idist.all_reduce(other)
        same(total, idist.broadcast(total, src=0), type(other))


@law()
def sums_have_the_same_bits_when_they_are_made_again(rank: int, size: int) -> None:
    values = [rough(rank, count, torch.float32) for count in (5, 3_000, 40_000)]
    first = [idist.all_reduce(value) for value in values]
    numbers = idist.all_reduce([0.1 * 3**rank, 1e16])
    for value, total in zip(values, first, strict=True):
        for _ in range(3):
            same(idist.all_reduce(value), total, len(value))
    same(idist.all_reduce([0.1 * 3**rank, 1e16]), numbers)


@law()
def an_exact_sum_is_rounded_once(rank: int, size: int) -> None:
    for dtype in FLOATS:
        parts = [_hard(r, size, dtype) for r in range(size)]
        kept = parts[rank].clone()
        same(idist.all_reduce(parts[rank], exact=True), _expected(parts), dtype)
        same(parts[rank], kept, "the input")
        grid = [part[:180].reshape(2, 3, 30).transpose(0, 2) for part in parts]
        same(idist.all_reduce(grid[rank], exact=True), _expected(grid), "transposed")
    pairs = [torch.complex(*rough(r, 40, torch.float32).view(2, 20)) for r in range(size)]
    sums = [_expected([part(pair) for pair in pairs]) for part in (torch.real, torch.imag)]
    same(idist.all_reduce(pairs[rank], exact=True), torch.complex(*sums))
    same(idist.all_reduce(pairs[rank], exact=True, async_op=True).wait(), torch.complex(*sums))
    for empty in (torch.ones(0), torch.ones(2, 0)):
        same(idist.all_reduce(empty, exact=True), empty)


@law()
def an_exact_sum_has_one_rule_for_what_isnt_finite(rank: int, size: int) -> None:
    for dtype in FLOATS:
        big = torch.finfo(dtype).max
        rows = [(INF, 1.0), (1.0, -INF), (INF, -INF), (INF, INF), (NAN, 1.0), (-INF, NAN)]
        rows += [(big, big), (-big, -big), (-0.0, -0.0), (-0.0, 0.0), (1.0, -1.0), (2.0, 3.0)]
        terms = torch.tensor(rows, dtype=dtype).T
        # Rank 0 has the first of two terms, the last rank has the second, other ranks have none.
        mine = terms if size == 1 else terms[:1] if rank == 0 else terms[1:]
        is_end = rank in (0, size - 1)
        same(idist.exact_sum(mine if is_end else mine[:0]), _sums(rows, dtype), dtype)
        if size > 1:
            mine = mine[0] if is_end else torch.full_like(mine[0], -0.0)
            same(idist.all_reduce(mine, exact=True), _sums(rows, dtype), dtype)


@law()
def exact_sums_of_containers_and_numbers_keep_their_shape(rank: int, size: int) -> None:
    parts = [rough(r, 30, torch.float32) for r in range(size)]
    double = [rough(r, 7, torch.float64) for r in range(size)]
    report = Metrics(0.1 * 3**rank, rank, {"a": parts[rank].view(5, 6), "b": parts[rank][:2]})
    got = idist.all_reduce(report, exact=True)
    same((got.loss, got.seen), (math.fsum(0.1 * 3**r for r in range(size)), sum(range(size))))
    same(got.hits, {"a": _expected(parts).view(5, 6), "b": _expected(parts)[:2]})
    mixed: Any = [double[rank], torch.tensor([rank == 0]), torch.tensor(rank, dtype=torch.uint16)]
    total = torch.tensor(sum(range(size)), dtype=torch.uint16)
    same(idist.all_reduce(mixed, exact=True), [_expected(double), torch.tensor([True]), total])
    same(idist.all_reduce(2**53 + 1, exact=True), size * (2**53 + 1))
    same(idist.all_reduce(True, exact=True), True)
    # The sum of the first two overflows, unless it is exact.
    numbers = [1e308, 1e308, -1e308][: min(size, 3)] + [0.0] * (size - 3)
    same(idist.all_reduce(numbers[rank], exact=True), correctly_rounded(numbers, torch.float64))
    infinity = INF if rank == 0 else -INF if rank == size - 1 else 0.0
    for number in (-NAN, infinity, NAN if rank == 0 else 1.0):
        wanted = INF if number == INF and size == 1 else NAN
        same(_bits(idist.all_reduce(number, exact=True)), _bits(wanted), number)
    same(idist.all_reduce(complex(0.1, -0.0), exact=True), complex(math.fsum([0.1] * size), -0.0))


def _bits(number: Any) -> bytes:
    """Return a float's bytes, which also show the sign of NaN."""
    return struct.pack("<d", number)


@law()
def an_exact_sum_doesnt_depend_on_which_rank_has_which_terms(rank: int, size: int) -> None:
    terms = torch.stack([_hard(r, 5, torch.float32) for r in range(5)])
    whole = _expected(list(terms))
    for ways in (size, 1):  # for 1, rank 0 has all terms
        mine = terms[rank::ways] if rank < ways else terms[:0]
        same(idist.exact_sum(mine), whole, ways)
    backwards = terms.flip(0)[(size - 1 - rank) :: size]
    tree: Any = {"a": backwards, "b": (backwards[:, :3].double(), backwards[:, :1].long())}
    got = idist.exact_sum(tree, async_op=True).wait()
    same(got["a"], whole)
    same(got["b"][0], _expected(list(terms[:, :3].double())))
    same(got["b"][1], terms[:, :1].long().sum(0))
    same(idist.exact_sum(terms[:0]), torch.zeros_like(whole))


@law()
def exact_sums_of_parts_are_those_of_the_whole(rank: int, size: int) -> None:
    """The bits do not depend on the size of a message or on other values in it."""
    value = rough(rank, 70_000, torch.float32, 60)
    whole = idist.all_reduce(value, exact=True)
    parts = list(torch.split(value, 29_000))
    same(torch.cat(idist.all_reduce(parts, exact=True)), whole, "in a list")
    same(idist.all_reduce(parts[2], exact=True), whole[58_000:], "by itself")
    same(whole, idist.broadcast(whole), "on every rank")


@law()
def what_has_no_exact_sum_is_refused_by_name(rank: int, size: int) -> None:
    for op, part in (("MEAN", "divide"), ("MAX", "without `exact`"), ("PRODUCT", "no exact")):
        raises(ArgumentError, ["SUM", part], idist.all_reduce, torch.ones(2), op, exact=True)
    tiny = torch.ones(3).to(torch.float8_e5m2)
    mine = tiny if rank == size - 1 else torch.ones(3)
    raises(PayloadError, [f"rank {size - 1}", "float8"], idist.all_reduce, mine, exact=True)
    uneven = {"a": torch.ones(2, 3), "b": torch.ones(1, 3)}
    raises(PayloadError, ["2", "1", "dim 0"], idist.exact_sum, uneven)
    raises(PayloadError, ["stack"], idist.exact_sum, 0.5)
    raises(PayloadError, ["dim 0"], idist.exact_sum, torch.tensor(1.0))
    if size > 1:
        shape = torch.ones(2, 3 + (rank == 0))
        raises(CollectiveMismatchError, ["rank 0", "[4]"], idist.exact_sum, shape)
        raises(CollectiveMismatchError, ["rank 0"], idist.all_reduce, shape, exact=True)


@law("groups")
def exact_sums_are_those_of_a_group(rank: int, size: int) -> None:
    group = idist.new_group(range(max(size - 1, 1)))
    parts = [rough(r, 100, torch.float64) for r in group.ranks]
    mine = rough(rank, 100, torch.float64)
    wanted = _expected(parts) if rank in group.ranks else mine
    same(idist.all_reduce(mine, group=group, exact=True), wanted)
    terms = mine.view(4, 25)
    wanted = _expected([row for part in parts for row in part.view(4, 25)])
    same(idist.exact_sum(terms, group=group), wanted if rank in group.ranks else terms)
