"""Exact sums of floats as integers: in any order, of any number of ranks, rounded once.

A float is an integer times the least number of its dtype, 2**-149 for float32. Its bits are cut
into limbs of `Layout.limb_bits` bits, each an int64 whose upper bits hold the carries of all
summands. So limbs are added like any other integers, exactly and in any order, and only their
sum is rounded. Only the limbs between the greatest and the least number in use are kept.

One exchange agrees on the exponents in use. Then block by block each rank cuts its terms into
limbs, the ordinary all_reduce adds these, and each rank rounds the sum.

All steps are exact, in integers or normal doubles: neither the order of instructions nor a mode
of the processor, such as `torch.set_flush_denormal`, changes a bit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as emulation
from unisono.collectives.call import exchange_blobs
from unisono.context import ContextState
from unisono.errors import PayloadError
from unisono.model.reduction import ReduceOp
from unisono.topology import Group

BLOCK = 1 << 16
"""How many numbers a block has. They fit into a core's cache, and a rank keeps the limbs of one
block at a time."""
_COUNT = struct.Struct("<Q")
_SPAN = struct.Struct("<Hh?")  # low, high, is_marked
_ROOM_BITS = 62
"""Bits of an int64 for a limb and its carries; one more bit is kept free for rounding."""
_DOUBLE_BITS = 960
"""Integers of at most this many bits stay far from a double's limits."""
_MARK_BITS = 21  # an int64 holds three counts of ranks
_MARK = (1 << _MARK_BITS) - 1


@dataclass(frozen=True, slots=True)
class Format:
    """Bit layout of a floating-point dtype."""

    dtype: torch.dtype
    bits: torch.dtype
    fraction: int

    @property
    def sign(self) -> int:
        """The bits of -0."""
        return int(torch.iinfo(self.bits).min)

    @property
    def infinity(self) -> int:
        """The bits of infinity; greater bits are those of NaN."""
        return int(torch.iinfo(self.bits).max) >> self.fraction << self.fraction

    @property
    def least(self) -> int:
        """The negative exponent of the least number, which is 2**-least."""
        # The bias of the exponent, 2**(bits of the exponent - 1) - 1, less 1, and the fraction.
        width = self.bits.itemsize * 8
        return (1 << (width - self.fraction - 2)) + self.fraction - 2

    @property
    def nan(self) -> int:
        """The bits of the NaN that a sum returns."""
        return self.infinity + (1 << (self.fraction - 1))


FORMATS: dict[torch.dtype, Format] = {
    torch.float16: Format(torch.float16, torch.int16, 10),
    torch.bfloat16: Format(torch.bfloat16, torch.int16, 7),
    torch.float32: Format(torch.float32, torch.int32, 23),
    torch.float64: Format(torch.float64, torch.int64, 52),
}
"""Dtypes that have exact sums."""


class Span(NamedTuple):
    """Range of exponents in some tensors; marked if they hold infinity, NaN or -0."""

    low: int
    high: int
    is_marked: bool

    @classmethod
    def of_all(cls, spans: Iterable[tuple[int, int, bool]]) -> Span:
        """Return the span that covers all `spans`."""
        lows, highs, marks = zip(*spans, strict=True)
        return cls(min(lows), max(highs), any(marks))


_NO_LOW = 4095  # above every exponent, so that `of_all` ignores it; fits into 16 bits


def span(terms: Tensor) -> Span:
    """Return the span of a tensor's numbers."""
    if terms.numel() == 0:
        return Span(_NO_LOW, -1, False)
    form = FORMATS[terms.dtype]
    bits = terms.view(form.bits)
    size = bits & ~form.sign
    # Subtracting 1 makes zero the greatest size, so that the minimum is that of the other numbers.
    nonzero = (size - 1).bitwise_and_(~form.sign)
    # Stacked, as one copy from an accelerator is faster than three.
    found = torch.stack([bits.amin().long(), size.amax().long(), nonzero.amin().long()])
    first, greatest, least = found.tolist()
    if greatest >= form.infinity:
        finite = terms.masked_fill(size >= form.infinity, 0.0)
        return span(finite)._replace(is_marked=True)
    # -0, whose bits are the least int, is marked, too: only a sum of nothing but -0 is -0.
    is_marked = first == form.sign
    if greatest == 0:
        return Span(_NO_LOW, -1, is_marked)
    # Subnormals, whose exponent is 0, have the unit of exponent 1, so both exponents count as 0.
    # `least + 1` undoes the subtraction above.
    low, high = (max((each >> form.fraction) - 1, 0) for each in (least + 1, greatest))
    return Span(low, high, is_marked)


@dataclass(frozen=True, slots=True)
class Layout:
    """Position of the limbs, the same on every rank."""

    low: int
    limb_bits: int
    limbs: int
    is_marked: bool

    @property
    def rows(self) -> int:
        """How many int64 each number takes."""
        return self.limbs + self.is_marked


def layout(found: Span, dtype: torch.dtype, count: int) -> Layout | None:
    """Return the layout for a sum of `count` numbers of a span, None if each of them is +0."""
    # Local, and the same on every rank for the same arguments.
    if found.high < 0 and not found.is_marked:
        return None
    limb_bits = _ROOM_BITS - count.bit_length()  # the rest takes the carries of `count` terms
    bits = found.high - found.low + FORMATS[dtype].fraction + 1
    # If there are only marks, no bits are needed; one limb is kept all the same.
    return Layout(found.low, limb_bits, max(-(-bits // limb_bits), 1), found.is_marked)


def add(terms: Tensor, plan: Layout) -> Tensor:
    """Cut this rank's numbers into limbs and add them up."""
    form = FORMATS[terms.dtype]
    rows = torch.zeros((plan.rows, terms.shape[1]), dtype=torch.int64, device=terms.device)
    add_term = _add_normal_term if _are_normal_in_double(plan, form) else _add_term
    for term in terms:
        add_term(rows[: plan.limbs], term, form, plan)
    if plan.is_marked:
        rows[-1] = _marks(terms, form)
    return rows


def _are_normal_in_double(plan: Layout, form: Format) -> bool:
    """Return whether a double holds all terms as integers, and no term was subnormal."""
    is_inside = plan.limbs * plan.limb_bits < _DOUBLE_BITS
    return plan.low > 0 and form.least - plan.low < _DOUBLE_BITS and is_inside


def _add_normal_term(limbs: Tensor, term: Tensor, form: Format, plan: Layout) -> None:
    """Add a term as `_add_term` does, in fewer steps."""
    # This is exact, because `_are_normal_in_double` holds and all factors are powers of two.
    # `_marks` records the infinities and NaN.
    finite = term.nan_to_num(0.0, 0.0, 0.0) if plan.is_marked else term
    rest = finite.double() * 2.0 ** (form.least - plan.low)
    for place in range(plan.limbs - 1, 0, -1):
        unit = 2.0 ** (place * plan.limb_bits)
        part = (rest * (1 / unit)).trunc_()
        limbs[place] += part.long()
        rest.sub_(part, alpha=unit)
    limbs[0] += rest.long()


def _add_term(limbs: Tensor, term: Tensor, form: Format, plan: Layout) -> None:
    """Add one term [n] to the limbs [limbs, n]."""
    bits = term.view(form.bits)
    size = (bits & ~form.sign).long()
    exponent = size >> form.fraction
    value = size.bitwise_and_((1 << form.fraction) - 1)
    # Add the implicit first bit, which subnormals lack.
    value += (exponent != 0).long().bitwise_left_shift_(form.fraction)
    if plan.is_marked:
        value.masked_fill_(exponent == form.infinity >> form.fraction, 0)
    sign = (bits >> (form.bits.itemsize * 8 - 1)).long()  # 0 or -1
    # Exponents 0 and 1 both count as 0, as in `span`. Only the exponent of a zero may be lower
    # than `low`, and a zero has no bits to shift.
    shift = exponent.clamp_(min=plan.low + 1).sub_(plan.low + 1)
    if plan.limbs == 1:
        # Only infinities and NaN would be shifted further, and their value is 0 here.
        value.bitwise_left_shift_(shift.clamp_(max=_ROOM_BITS))
        limbs[0] += value.bitwise_xor_(sign).sub_(sign)
        return
    mask = (1 << plan.limb_bits) - 1
    for limb in limbs:
        # The first shift is for the limb in which the term begins, the second for the limbs above;
        # in limbs below, the first one moves all bits out of the mask.
        part = value << shift.clamp(0, plan.limb_bits)
        part = part.bitwise_right_shift_((-shift).clamp_(0, 63)).bitwise_and_(mask)
        limb += part.bitwise_xor_(sign).sub_(sign)
        shift -= plan.limb_bits


def _marks(terms: Tensor, form: Format) -> Tensor:
    """Count, for each number, whether some term is +infinity, -infinity or anything but -0."""
    # They are three fields of an int64, so that a sum over ranks counts the ranks in each field.
    # NaN counts as both infinities.
    bits = terms.view(form.bits)
    size = bits & ~form.sign
    is_special, is_nan = size >= form.infinity, size > form.infinity
    fields = [
        (is_special & (bits >= 0)) | is_nan,
        (is_special & (bits < 0)) | is_nan,
        bits != form.sign,
    ]
    total = torch.zeros(terms.shape[1], dtype=torch.int64, device=terms.device)
    for place, field in enumerate(fields):
        total += field.any(0).long() << (place * _MARK_BITS)
    return total


def rounded(rows: Tensor, plan: Layout, dtype: torch.dtype) -> Tensor:
    """Round a sum of limbs to the nearest number, ties to even."""
    form, limbs = FORMATS[dtype], rows[: plan.limbs]
    _carry(limbs, plan.limb_bits)  # now only the last limb may be negative
    result = _converted if _are_normal(plan, form) else _composed
    total = result(limbs, plan, form)
    if plan.is_marked:
        _apply_marks(total.view(form.bits), rows[-1], form)  # writes to `total`
    return total


def _are_normal(plan: Layout, form: Format) -> bool:
    """Return whether every sum is zero or a normal number, and every power of two fits a double."""
    # False for float16 and bfloat16: torch would round an integer twice, first to float32.
    is_wide = form.fraction >= FORMATS[torch.float32].fraction
    is_inside = plan.low + (plan.limbs - 1) * plan.limb_bits < form.least + _DOUBLE_BITS
    return is_wide and form.fraction <= plan.low and is_inside


def _converted(limbs: Tensor, plan: Layout, form: Format) -> Tensor:
    """Round by converting 62 bits to a float, which is then multiplied by a power of two."""
    if plan.limbs == 1:
        return limbs[0].to(form.dtype).mul_(2.0 ** (plan.low - form.least))
    value, exponent = _leading(limbs, plan)
    # The double 2**(exponent - least), made of its bits: it may be too large for a float32.
    power = exponent.sub_(form.least - 1023).bitwise_left_shift_(52).view(torch.float64)
    return (value.to(form.dtype).double() * power).to(form.dtype)


def _composed(limbs: Tensor, plan: Layout, form: Format) -> Tensor:
    """Round bit by bit and assemble the float; correct at a dtype's limits, too."""
    # The limbs, of which the last is the highest, have been carried: only the last may be negative,
    # and has the sign of the sum, in two's complement. They are overwritten here.
    sign = limbs[-1] >> 63
    limbs.bitwise_xor_(sign).sub_(sign)  # negates them if the sign is -1
    _carry(limbs, plan.limb_bits)  # negating left limbs below 0
    bits = _nearest(*_leading(limbs, plan), form)
    bits.bitwise_xor_(sign.bitwise_and_(form.sign))
    return bits.to(form.bits).view(form.dtype)


def _carry(limbs: Tensor, limb_bits: int) -> None:
    """Carry the excess bits of each limb but the last into the next one."""
    for limb, above in zip(limbs[:-1], limbs[1:], strict=True):
        above += limb >> limb_bits
        limb &= (1 << limb_bits) - 1


def _leading(limbs: Tensor, plan: Layout) -> tuple[Tensor, Tensor]:
    """Return a sum's first 62 bits, the last one set if more bits follow, and its exponent."""
    # A negative sum is in two's complement: there, too, an odd number stands for the interval
    # around it. The exponent is that of the last bit.
    value = limbs[-1]
    exponent = torch.full_like(value, plan.low + (plan.limbs - 1) * plan.limb_bits)
    mask, rest = (1 << plan.limb_bits) - 1, None
    # `value` takes as many first bits of each limb as it has room for, `rest` the other bits.
    for limb in limbs[:-1].flip(0):
        # A negative number is as long as its complement.
        room = (_ROOM_BITS - _length(value ^ (value >> 63))).clamp_(0, plan.limb_bits)
        exponent -= room
        cut = (limb << room).bitwise_and_(mask)
        rest = cut if rest is None else rest.bitwise_or_(cut)
        value = value << room
        value |= limb >> room.neg_().add_(plan.limb_bits)  # in place: the last use of `room`
    return value if rest is None else value.bitwise_or_(rest != 0), exponent


def _length(value: Tensor) -> Tensor:
    """Return the number of bits of each int64 [n], none of which is negative."""
    # A double's exponent shows it. Of 1s in a row only the first is kept, so that the conversion
    # to a double never rounds up.
    first = (value & ~(value >> 1)).double().view(torch.int64)
    # The exponent field of a double is the number of bits plus 1022; that of zero is 0.
    return (first >> 52).sub_(1022).clamp_(min=0)


def _nearest(value: Tensor, exponent: Tensor, form: Format) -> Tensor:
    """Return the bits of the float that is nearest to value * 2**exponent."""
    # The exponent of the last bit that the result keeps.
    last = (_length(value) + exponent).sub_(form.fraction + 1).clamp_(min=0)
    last.masked_fill_(value == 0, 0)
    shift = last - exponent
    drop = shift.clamp(min=0)
    half = (torch.ones_like(drop) << drop) >> 1
    odd = (value >> drop).bitwise_and_(1)
    # To round ties to even, add half less 1, and 1 more if the last kept bit is set; add nothing
    # if no bit is dropped.
    kept = (half.sub_(1).add_(odd).clamp_(min=0).add_(value)) >> drop
    kept <<= shift.neg_().clamp_(0, 63)
    # A result too long for a significand carries into the exponent's bits, up to infinity.
    greatest = (form.infinity >> form.fraction) - 1
    bits = last.clamp_(max=greatest).bitwise_left_shift_(form.fraction)
    # Subtracting infinity first keeps the sum of a float64's bits within an int64.
    return bits.sub_(form.infinity).add_(kept).clamp_(max=0).add_(form.infinity)


def _apply_marks(bits: Tensor, marks: Tensor, form: Format) -> None:
    """Overwrite sums that the marks show to be -0, infinite or NaN."""
    up = (marks & _MARK) > 0
    down = ((marks >> _MARK_BITS) & _MARK) > 0
    # NaN comes last, as it is marked as both infinities.
    bits.masked_fill_((marks >> 2 * _MARK_BITS) == 0, form.sign)
    bits.masked_fill_(up, form.infinity)
    bits.masked_fill_(down, form.infinity | form.sign)
    bits.masked_fill_(up & down, form.nan)


def check_summable(tensor: Tensor) -> None:
    """Raise if a tensor's floats have no exact sum."""
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype not in FORMATS:
        raise PayloadError(f"there is no exact sum of {dtype}: pass tensor.float()")


def sum_exactly(context: ContextState, call: str, terms: Tensor, group: Group | None) -> Tensor:
    """Sum the terms of all ranks, [k, n] on the transport device, to [n]."""
    # Collective over `group`. Ranks may have different k.
    if terms.is_complex():
        parts = torch.view_as_real(terms.contiguous()).flatten(1)
        return torch.view_as_complex(sum_exactly(context, call, parts, group).view(-1, 2))
    dtype = terms.dtype
    if dtype not in FORMATS:
        # As in `all_reduce`, bools are summed by OR and integers wrap, so 64 bits are enough.
        total = terms.any(0) if dtype is torch.bool else terms.to(torch.int64).sum(0).to(dtype)
        return emulation.all_reduce(context, total, ReduceOp.SUM, group, is_ours=True)
    blocks = torch.split(terms, BLOCK, dim=1)
    spans, count = _agreed_spans(context, call, terms, [span(block) for block in blocks], group)
    total = terms.new_zeros(terms.shape[1])
    for found, block, into in zip(spans, blocks, torch.split(total, BLOCK), strict=True):
        plan = layout(found, dtype, count)
        if plan is not None:  # else each sum is +0 on all ranks, as in `total`
            limbs = add(block, plan)
            limbs = emulation.all_reduce(context, limbs, ReduceOp.SUM, group, is_ours=True)
            into.copy_(rounded(limbs, plan, dtype))
    return total


def _agreed_spans(
    context: ContextState, call: str, terms: Tensor, spans: Sequence[Span], group: Group | None
) -> tuple[list[Span], int]:
    """Return the span of each block over all ranks, and the number of all terms."""
    # Collective over `group`.
    # A rank's frame: the count of its terms as uint64, then for each block low as uint16, high as
    # int16 and `is_marked` as a byte, little-endian.
    frame = _COUNT.pack(terms.shape[0]) + b"".join(_SPAN.pack(*each) for each in spans)
    frames = exchange_blobs(context, f"{call} of {terms.shape[1]} {terms.dtype}", frame, group)
    count = sum(_COUNT.unpack_from(frame)[0] for frame in frames)
    rows = [_SPAN.iter_unpack(memoryview(frame)[_COUNT.size :]) for frame in frames]
    return [Span.of_all(column) for column in zip(*rows, strict=True)], count
