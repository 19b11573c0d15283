"""Calls that all ranks make together, and an oracle in plain Python that needs no ranks."""

from __future__ import annotations

import importlib
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

import unisono
from tests.support.random_programs.values import (
    Filled,
    Point,
    Unusual,
    content,
    difference,
    make,
    mapped,
)
from unisono.errors import UnisonoError

BASIC: dict[str, tuple[str, ...]] = {
    "barrier": (),
    "all_reduce": ("op",),
    "all_reduce_": ("op",),
    "reduce": ("root", "op"),
    "reduce_scatter": ("op",),
    "all_gather": (),
    "gather": ("root",),
    "broadcast": ("root",),
    "broadcast_": ("root",),
    "scatter": ("root",),
    "all_to_all": (),
}
"""Calls over a group, which may be asynchronous: what each takes after its value."""


def _mm(name: str) -> Any:
    return getattr(importlib.import_module("unisono.compat.mmengine"), name)


def _reduce_grads(value: Any, step: Step) -> list[Any]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in value]
    for param, grad in zip(params, value, strict=True):
        param.grad = grad
    unisono.all_reduce_grads(params, op=step.op, **dict(step.options))
    return [param.grad for param in params]


FORMS: dict[str, Callable[[Any, Step], Any]] = {
    "reduce_mean": lambda value, _: unisono.reduce_mean(value),
    "reduce_dict": lambda value, step: unisono.reduce_dict(value, step.op),
    "all_reduce_params": lambda value, step: unisono.all_reduce_params(
        value, op=step.op, **dict(step.options)
    ),
    "all_reduce_grads": _reduce_grads,
    "broadcast_params": lambda value, step: unisono.broadcast_params(value, step.root),
    "mm.all_reduce": lambda value, step: _mm("all_reduce")(value, step.op),
    "mm.all_reduce_dict": lambda value, step: _mm("all_reduce_dict")(value, step.op),
    "mm.all_reduce_params": lambda value, step: _mm("all_reduce_params")(
        value, op=step.op, **dict(step.options)
    ),
}
"""Calls made of those."""


@dataclass(frozen=True)
class Step:
    """One call: the values of all ranks, and how it ends.

    Args:
        call: of ``BASIC`` or ``FORMS``.
        values: by rank, described.
        root: source or destination.
        op: of a reduction.
        group: ranks; None for all.
        options: of the call.
        is_async: whether it is started and waited for.
        ends: "right"; "refused" on every rank; "either" of them; "raises", refused for a value
            that can't be read; "reads", as that, but only where some rank reads it.
        is_near: whether the right value is a mean that may be rounded.
    """

    call: str
    values: tuple[Any, ...]
    root: int = 0
    op: Any = "SUM"
    group: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    is_async: bool = False
    ends: str = "right"
    is_near: bool = False

    @property
    def members(self) -> list[int]:
        return sorted(range(len(self.values)) if self.group is None else self.group)

    @property
    def is_in_place(self) -> bool:
        return self.call.endswith(("_", "_params", "_grads")) or self.call.startswith("mm.")


# On a rank


@dataclass(frozen=True)
class Raised:
    """The error that a rank got."""

    kind: str
    text: str
    is_ours: bool


def attempt(work: Callable[[], Any]) -> Any:
    """Return what a call returns, or the error that it raises."""
    try:
        return work()
    except Exception as error:
        is_ours = isinstance(error, UnisonoError)
        text = str(error) if is_ours else "".join(traceback.format_exception(error)[-3:])
        return Raised(type(error).__name__, text[:600], is_ours)


def perform(step: Step, value: Any, group: Any = None, **how: Any) -> Any:
    """Make the call of a step with a value, in `group` or one of the step's ranks."""
    if step.call in FORMS:
        return FORMS[step.call](value, step)
    given = [] if step.call == "barrier" else [value]
    given += [getattr(step, name) for name in BASIC[step.call]]
    group = list(step.group) if group is None and step.group is not None else group
    return getattr(unisono, step.call)(*given, group=group, **how)


def begin(step: Step, rank: int, group: Any = None) -> Callable[[], Raised | str | None]:
    """Make the call of a step on this rank; return what waits for it and says what was wrong.

    Collective over the step's group.
    """
    value = make(step.values[rank])
    if step.ends in ("raises", "reads"):  # no looking at the value
        got = attempt(lambda: _waited(_started(step, value, group)))
        return lambda: got if isinstance(got, Raised) else None
    before = content(value)
    started = attempt(lambda: _started(step, value, group))

    def finish() -> Raised | str | None:
        got = started if isinstance(started, Raised) else attempt(lambda: _waited(started))
        after = content(value)
        if isinstance(got, Raised):
            changed = got.is_ours and difference(after, before)
            return f"{got!r}, but its value changed: {changed}" if changed else got
        if step.is_in_place and got is None:
            got = value
        got = content(got)
        return _wrong(step, rank, got) or difference(after, got if step.is_in_place else before)

    return finish


def _started(step: Step, value: Any, group: Any) -> Any:
    how = {"async_op": True} if step.is_async else {}
    return perform(step, value, group, **how)


def _waited(started: Any) -> Any:
    if isinstance(started, unisono.Handle):
        started.is_completed()
        return started.wait()
    return started


def _wrong(step: Step, rank: int, got: Any) -> str | None:
    if step.is_near:
        return _wrong_mean(step, rank, got)
    return difference(got, content(expected(step, rank)))


# Of all ranks


def wrong_with(step: Step, found: Sequence[Raised | str | None]) -> str | None:
    """Return what is wrong with what the ranks found at a step, None if nothing is."""
    for rank, one in enumerate(found):
        if isinstance(one, str):
            return f"rank {rank}: {one}"
        if isinstance(one, Raised) and not _may_be_raised(step, rank, one):
            return f"rank {rank} raised {one!r}"
    raised = [isinstance(found[rank], Raised) for rank in step.members]
    if step.ends == "reads" or all(raised):
        return None
    if any(raised):
        return f"not refused on every rank: {found!r}"
    return "not refused" if step.ends in ("refused", "raises") else None


def _may_be_raised(step: Step, rank: int, error: Raised) -> bool:
    """Return whether an error of ours refuses a step with the ranks in step after it."""
    if step.ends == "right" or not error.is_ours or rank not in step.members:
        return False
    if step.ends == "reads":
        return True
    # The argument of the rank's own is reported to it as such.
    is_own = step.ends == "raises" and rank == step.root and step.call == "all_reduce_params"
    kinds = ("PayloadError", "CollectiveMismatchError")
    return error.kind in kinds or (is_own and error.kind == "ArgumentError")


# The oracle


def expected(step: Step, rank: int) -> Any:
    """Return what a step gives on a rank."""
    own, members = step.values[rank], step.members
    if rank not in members:
        return None if step.call == "barrier" else make(own)
    place, count = members.index(rank), len(members)
    given = [_seen(step.values[member]) for member in members]
    answers: dict[str, Callable[[], Any]] = {
        "barrier": lambda: None,
        "reduce": lambda: _fold(step.op, given) if rank == step.root else None,
        "reduce_scatter": lambda: make(_fold(step.op, given)).chunk(count)[place],
        "all_gather": lambda: _joined(make(given)),
        "gather": lambda: _joined(make(given)) if rank == step.root else None,
        "scatter": lambda: _seen(step.values[step.root])[place],
        "all_to_all": lambda: _swapped(make(given), place),
    }
    if step.call.startswith("broadcast"):
        return make(_seen(step.values[step.root]))
    return make(answers.get(step.call, lambda: _fold(step.op, given))())


def _seen(value: Any) -> Any:
    """Return what the oracle has instead of tensors that are odd or share memory."""
    if isinstance(value, Unusual):
        return content(value.make())
    return mapped(_seen, value)


def _joined(made: list[Any]) -> Any:
    if not all(isinstance(value, Tensor) for value in made):
        return made
    return torch.cat(made) if made[0].dim() else torch.stack(made)


def _swapped(made: list[Any], place: int) -> Any:
    if isinstance(made[0], Tensor):
        return torch.cat([tensor.chunk(len(made))[place] for tensor in made])
    return [values[place] for values in made]


def _fold(op: str, given: Sequence[Any]) -> Any:
    first = given[0]
    if isinstance(first, Filled):
        columns = zip(*(tensor.row for tensor in given), strict=True)
        return replace(first, row=tuple(_wrapped(_fold(op, c), first.dtype) for c in columns))
    if isinstance(first, dict):
        return {key: _fold(op, [each[key] for each in given]) for key in first}
    if isinstance(first, Point):
        return Point(_fold(op, [p.x for p in given]), _fold(op, [p.y for p in given]))
    if isinstance(first, tuple) and first[0] == "DTensor":  # each counts as its whole
        return torch.cat([part for _, part in given]) * len(given)
    if isinstance(first, (list, tuple)):
        return type(first)(_fold(op, column) for column in zip(*given, strict=True))
    if isinstance(first, Tensor):  # of whole numbers
        rows = torch.stack(list(given))
        total = rows.amax(0) if op.upper() == "MAX" else rows.sum(0, dtype=rows.dtype)
        return (total / len(given)).to(rows.dtype) if op.upper() == "MEAN" else total
    return _fold_numbers(op, given)


def _wrapped(number: Any, dtype: str) -> Any:
    """Return a number as an element of a dtype has it: whole ones wrap."""
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind is torch.bool:
        return number
    least, bits = torch.iinfo(kind).min, 8 * kind.itemsize
    return (number - least) % 2**bits + least


def _fold_numbers(op: str, given: Sequence[Any]) -> Any:
    if isinstance(given[0], bool):
        if op == "XOR":
            return sum(given) % 2 == 1
        return any(given) if op in ("SUM", "MAX", "OR") else all(given)
    if op in ("MIN", "MAX"):  # NaN wins, and -0.0 is below 0.0
        ordered = sorted(given, key=lambda x: (x, math.copysign(1, x)))
        return next((x for x in given if x != x), ordered[0 if op == "MIN" else -1])
    steps: dict[str, Callable[[Any, Any], Any]] = {
        "PRODUCT": lambda a, b: a * b,
        "AND": lambda a, b: a & b,
        "OR": lambda a, b: a | b,
        "XOR": lambda a, b: a ^ b,
    }
    total = reduce(steps.get(op, lambda a, b: a + b), given)
    return total / len(given) if op == "AVERAGE" else total


# Means that may be rounded


def _wrong_mean(step: Step, rank: int, got: Any) -> str | None:
    if rank not in step.members or (step.call == "reduce" and rank != step.root):
        return difference(got, content(expected(step, rank)))
    given = [_only(step.values[member]) for member in step.members]
    number = _only(got)
    if not isinstance(given[0], Filled):
        return _wrong_row(step, (number,), [tuple(given)], None)
    columns = list(zip(*(tensor.row for tensor in given), strict=True))
    is_made_float = _are_whole(given[0].row) and step.call in ("reduce_mean", "reduce_dict")
    dtype = "float32" if is_made_float else given[0].dtype
    numel = math.prod(given[0].shape) // (len(given) if step.call == "reduce_scatter" else 1)
    if str(number.dtype) != f"torch.{dtype}" or number.numel() != numel:
        return f"got {number.numel()} of {number.dtype}"
    # The order of a sum may depend on the place in a tensor, and its last bit on the order.
    rows = number.reshape(-1, len(columns))
    data = rows.view(torch.uint8)
    rows = rows[:1] if torch.equal(data, data[:1].expand_as(data)) else rows
    faults = (
        _wrong_row(step, row, columns, dtype) for row in dict.fromkeys(map(tuple, rows.tolist()))
    )
    return next(filter(None, faults), None)


def _only(value: Any) -> Any:
    """Return the one value of a list or dict."""
    values = value.values() if isinstance(value, dict) else value
    return next(iter(values)) if isinstance(value, (list, dict)) else value


def _are_whole(numbers: Sequence[Any]) -> bool:
    return not any(isinstance(x, (float, complex)) for x in numbers)


def _wrong_row(
    step: Step, row: Sequence[Any], columns: Sequence[Sequence[Any]], dtype: str | None
) -> str | None:
    for one, given in zip(row, columns, strict=True):
        parts = [(one, given)]
        if isinstance(one, complex):
            numbers = [complex(x) for x in given]
            parts = [(one.real, [x.real for x in numbers]), (one.imag, [x.imag for x in numbers])]
        for number, terms in parts:
            is_cut = step.call.startswith("mm.") and _are_whole(terms)  # as mmengine does
            if is_cut and number == math.trunc(Fraction(sum(terms), len(terms))):
                continue
            if not _is_mean(number, terms, dtype):
                return f"{number!r} is not the mean of {terms!r}"
    return None


def _is_mean(number: Any, given: Sequence[Any], dtype: str | None) -> bool:
    """Return whether a number is the mean of others, but for the rounding of its dtype."""
    special = [x for x in given if isinstance(x, float) and not math.isfinite(x)]
    if special:
        total = sum(special)
        return bool(number == total) or (math.isnan(number) and math.isnan(total))
    if isinstance(number, float) and not math.isfinite(number):
        return False
    true = sum(map(Fraction, given)) / len(given)
    if isinstance(number, int):
        return Fraction(number) == true
    if dtype is None and _are_whole(given):
        return bool(number == float(true))
    kind = torch.finfo(torch.float64 if dtype is None else getattr(torch, dtype))
    eps, least = Fraction(kind.eps), Fraction(kind.smallest_normal) * Fraction(kind.eps)
    greatest: Any = max(abs(Fraction(x)) for x in given)
    bound = (eps * greatest + least) * len(given)
    return bool(abs(Fraction(number) - true) <= bound)
