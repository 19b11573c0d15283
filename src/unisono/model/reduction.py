"""Reduction operations, and their single definition for tensors and numbers."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from operator import add, and_, mul, or_, xor
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import ArgumentError, PayloadError

__all__ = (
    "TENSOR_STEPS",
    "FoldLike",
    "Number",
    "OpLike",
    "ReduceOp",
    "as_ordered_ints",
    "fold_numbers",
    "fold_tensors",
    "is_order_of_floats",
    "mean_factors",
    "parse_op",
    "sum_numbers_exactly",
)

Number = bool | int | float | complex


class ReduceOp(enum.Enum):
    """Operation that reduces the values of several ranks to one."""

    SUM = "SUM"
    AVERAGE = "AVERAGE"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    AND = "AND"
    OR = "OR"
    XOR = "XOR"

    @property
    def is_bitwise(self) -> bool:
        """Whether it works on bits, and therefore only on integers and bools."""
        return self in (ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR)


_BY_NAME: dict[str, ReduceOp] = {op.name: op for op in ReduceOp}
_BY_NAME |= {"MEAN": ReduceOp.AVERAGE, "AVG": ReduceOp.AVERAGE}
_BY_NAME |= {"BAND": ReduceOp.AND, "BOR": ReduceOp.OR, "BXOR": ReduceOp.XOR}  # torch's names


_FoldName: TypeAlias = Literal[
    "SUM", "PRODUCT", "MIN", "MAX", "AND", "OR", "XOR", "BAND", "BOR", "BXOR",
    "sum", "product", "min", "max", "and", "or", "xor", "band", "bor", "bxor",
]  # fmt: skip
_MeanName: TypeAlias = Literal[
    "AVERAGE", "MEAN", "AVG",
    "average", "mean", "avg",
]  # fmt: skip
_Fold: TypeAlias = Literal[
    ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX,
    ReduceOp.AND, ReduceOp.OR, ReduceOp.XOR,
]  # fmt: skip
FoldLike: TypeAlias = "_FoldName | _Fold"
"""Values of `op=` that type checkers know not to be a mean, so that integers stay integers."""
OpLike: TypeAlias = "_FoldName | _MeanName | ReduceOp | dist.ReduceOp | dist.ReduceOp.RedOpType"
"""Values of `op=`: a name, a ReduceOp, or one of ``torch.distributed.ReduceOp``."""


def parse_op(op: OpLike | str) -> ReduceOp:
    """Return the reduction for a name, in upper or lower case, or for an operation of torch."""
    if isinstance(op, ReduceOp):
        return op
    name = op if isinstance(op, str) else _name_in_torch(op)
    found = _BY_NAME.get(name.upper())
    if found is not None:
        return found
    known = " ".join((*ReduceOp.__members__, "MEAN"))
    raise ArgumentError(f"unknown reduction {op!r}: use one of {known}, in upper or lower case")


def _name_in_torch(op: object) -> str:
    """Return the name of an operation of torch.distributed; empty for any other object."""
    if not dist.is_available() or type(op) not in (dist.ReduceOp, dist.ReduceOp.RedOpType):
        return ""
    known: dict[str, object] = dict(dist.ReduceOp.RedOpType.__members__)
    return next((name for name, value in known.items() if op == value), "")


TENSOR_STEPS: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.AND: torch.bitwise_and,
    ReduceOp.OR: torch.bitwise_or,
    ReduceOp.XOR: torch.bitwise_xor,
}
"""Function that reduces two tensors; each takes ``out=``. For AVERAGE see `mean_factors`."""


def mean_factors(size: int) -> tuple[float, float]:
    """Return the factor before a sum of `size` terms, and the divisor after it, for their mean."""
    # A sum that is divided only at the end may overflow although the mean doesn't. The first factor
    # is a power of two, so that it rounds only subnormal numbers.
    before = 2.0 ** -(size - 1).bit_length()
    return before, size * before


def fold_tensors(
    op: ReduceOp, parts: Sequence[Tensor] | Tensor, out: Tensor | None = None
) -> Tensor:
    """Reduce tensors of equal shape in the order given, as every model must; into `out` if given.

    AVERAGE is for floats that `mean_factors` hardly rounds, so neither for float16 nor integers.
    """
    count = len(parts)
    if op is ReduceOp.AVERAGE:
        before, after = mean_factors(count)
        total = torch.mul(parts[0], before, out=out)
        for position in range(1, count):
            total.add_(parts[position], alpha=before)
        return total if after == 1.0 else total.div_(after)
    if count == 1:
        return parts[0].clone() if out is None else out.copy_(parts[0])
    step = TENSOR_STEPS[op]
    total = step(parts[0], parts[1], out=out)
    for position in range(2, count):
        step(total, parts[position], out=total)
    return total


_NUMBER_STEPS: dict[ReduceOp, Callable[[Any, Any], Any]] = {
    ReduceOp.PRODUCT: mul,
    ReduceOp.AND: and_,
    ReduceOp.OR: or_,
    ReduceOp.XOR: xor,
}


def fold_numbers(op: ReduceOp, values: Sequence[Number]) -> Number:
    """Reduce Python numbers in the order given; integers are reduced exactly."""
    # The first value alone is looked at, as `add` is right for any that follow.
    if op is ReduceOp.SUM and type(values[0]) in (int, float):
        # The usual case, first. Not by `sum`, which rounds floats differently since Python 3.12.
        return reduce(add, values)
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        if op is ReduceOp.AVERAGE:
            raise PayloadError("AVERAGE isn't defined on bool: pass int(value) or float(value)")
        if op is ReduceOp.XOR:
            return bool(reduce(xor, values))
        return any(values) if op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.OR) else all(values)
    if op.is_bitwise and not kinds <= {bool, int}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise PayloadError(f"{op.name} works on bool and int, not on {names}")
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if complex in kinds:
            raise PayloadError(f"{op.name} isn't defined on complex numbers")
        return _extreme(op, values)
    if op in _NUMBER_STEPS:
        return reduce(_NUMBER_STEPS[op], values)
    return _mean(values) if op is ReduceOp.AVERAGE else reduce(add, values)


def sum_numbers_exactly(values: Sequence[Any]) -> Number:
    """Sum Python numbers without rounding, then round once."""
    kinds = {type(value) for value in values}
    if kinds <= {bool, int}:
        return fold_numbers(ReduceOp.SUM, values)
    if complex in kinds:
        real, imag = ([getattr(v, part) for v in values] for part in ("real", "imag"))
        return complex(_float_sum(real), _float_sum(imag))
    return _float_sum(values)


def _float_sum(values: Sequence[float]) -> float:
    special = [value for value in values if not math.isfinite(value)]
    if any(map(math.isnan, special)) or len(set(special)) > 1:
        return math.nan  # always the same NaN: a sum's would depend on the order
    if special:
        return float(special[0])
    if all(value == 0 and math.copysign(1, value) < 0 for value in values):
        return -0.0  # a Fraction has no -0
    total = sum(map(Fraction, values), Fraction())
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _mean(values: Sequence[Any]) -> Number:
    """Return the mean, even if the sum is beyond the largest float."""
    if any(isinstance(value, complex) for value in values):
        real, imag = (_mean([getattr(v, part) for v in values]) for part in ("real", "imag"))
        return complex(real, imag)
    total, count = reduce(add, values), len(values)
    # An infinite value makes an infinite mean; any other infinite sum has overflowed.
    if not math.isinf(total) or any(math.isinf(value) for value in values):
        return total / count  # type: ignore[no-any-return]
    # The factor is a power of two, so that only negligibly small values are rounded.
    scale = 0.5 ** (count - 1).bit_length()
    return reduce(add, [value * scale for value in values]) / (count * scale)  # type: ignore[no-any-return]


def _extreme(op: ReduceOp, values: Sequence[Any]) -> Number:
    """Return the least or greatest value; NaN wins and -0.0 is below 0.0, as in tensors."""
    if any(value != value for value in values):
        return float("nan")
    choose = min if op is ReduceOp.MIN else max
    best: Any = choose(values, key=lambda value: (value, math.copysign(1, value)))
    kinds = {type(value) for value in values}
    # A bool among integers becomes an integer, and an integer among floats a float.
    return float(best) if float in kinds else int(best)


def is_order_of_floats(tensor: Tensor, op: ReduceOp) -> bool:
    """Return whether `op` is MIN or MAX of floats, for which libraries treat NaN differently."""
    return tensor.is_floating_point() and op in (ReduceOp.MIN, ReduceOp.MAX)


def as_ordered_ints(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Convert floats to integers of the same order, with NaN as the winning extreme."""
    # Narrower floats come as float32, to which the caller has converted them.
    bits = torch.int64 if tensor.dtype is torch.float64 else torch.int32
    magnitude = torch.iinfo(bits).max
    nan = torch.iinfo(bits).min if op is ReduceOp.MIN else magnitude
    shift = bits.itemsize * 8 - 1

    def flip(key: Tensor) -> Tensor:  # is its own inverse
        # The bits of negative floats, read as integers, are in descending order.
        return key ^ ((key >> shift) & magnitude)

    def restore(key: Tensor) -> Tensor:
        return flip(key).view(tensor.dtype).masked_fill_(key == nan, float("nan"))

    return flip(tensor.view(bits)).masked_fill_(tensor.isnan(), nan), restore
