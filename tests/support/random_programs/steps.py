"""Calls that all ranks make together, and an oracle in plain Python that needs no ranks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.random_programs.values import Filled, content, difference, make

BASIC = (
    "barrier", "all_reduce", "all_reduce_", "reduce", "reduce_scatter", "all_gather", "gather",
    "broadcast", "broadcast_", "scatter", "all_to_all",
)  # fmt: skip
"""Calls over a group, which may be asynchronous; all other calls are built from these."""


@dataclass(frozen=True)
class Step:
    """One call: the values of all ranks, and how it ends.

    Args:
        call: a function of unisono, or "mm." and one of its compat.mmengine.
        values: descriptions of the values, by rank.
        root: source or destination.
        op: operation of a reduction.
        group: ranks of the group; None for all.
        options: further arguments of the call.
        is_async: whether the call is asynchronous.
        ends: "right"; "refused" on every rank; "either" of them; "raises" if the value of a rank
            can't be read; "reads" if that may raise only on ranks that read the value.
        is_near: whether the right value is a mean that may be rounded.
        line: line number of the call, by which ranks compare their calls.
    """

    call: str
    values: tuple[Any, ...]
    root: int = 0
    op: str = "SUM"
    group: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    is_async: bool = False
    ends: str = "right"
    is_near: bool = False
    line: int = 0

    @property
    def members(self) -> list[int]:
        return sorted(range(len(self.values)) if self.group is None else self.group)

    @property
    def is_in_place(self) -> bool:
        return self.call.endswith(("_", "_params", "_grads")) or self.call.startswith("mm.")


def expected(step: Step, rank: int) -> Any:
    """Return the content of a step's right result on a rank."""
    if step.call == "barrier" or rank not in step.members:
        return None if step.call == "barrier" else content(make(step.values[rank]))
    if rank != step.root and step.call in ("gather", "reduce"):
        return None
    given = [content(make(step.values[member])) for member in step.members]
    place, of_root = step.members.index(rank), given[step.members.index(step.root)]
    if "gather" in step.call:
        return _joined(given)
    if step.call == "all_to_all":
        parts = [_parts(one, len(given))[place] for one in given]
        return _joined(parts) if isinstance(given[0], Tensor) else parts
    if step.call == "scatter" or step.call.startswith("broadcast"):
        return of_root[place] if step.call == "scatter" else of_root
    total = _fold(step.op.upper(), given)
    return _parts(total, len(given))[place] if step.call == "reduce_scatter" else total


def _joined(given: list[Any]) -> Any:
    if not all(isinstance(value, Tensor) for value in given):
        return given
    return torch.cat(given) if given[0].dim() else torch.stack(given)


def _parts(value: Any, count: int) -> Any:
    return value.chunk(count) if isinstance(value, Tensor) else value


_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "MEAN": operator.add,
    "PRODUCT": operator.mul,
    "AND": operator.and_,
    "OR": operator.or_,
    "XOR": operator.xor,
}
_STEPS_OF_ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    **_STEPS,
    "MIN": np.minimum,
    "MAX": np.maximum,
}


def _fold(op: str, given: Sequence[Any]) -> Any:
    first = given[0]
    if isinstance(first, dict):
        return {key: _fold(op, [each[key] for each in given]) for key in first}
    if isinstance(first, tuple) and first[0] == "DTensor":  # each counts as its whole
        return torch.cat([part for _, part in given]) * len(given)
    if isinstance(first, (list, tuple)):
        return type(first)(_fold(op, column) for column in zip(*given, strict=True))
    if isinstance(first, str):  # the name of a class
        return first
    if not isinstance(first, Tensor):
        return _fold_numbers(op, given)
    # This is exact, as floats are whole numbers, or are only compared.
    is_float = first.is_floating_point()
    arrays = [(each.double() if is_float else each).reshape(-1).numpy() for each in given]
    total = reduce(_STEPS_OF_ARRAYS[op], arrays)
    total = total / len(given) if op == "MEAN" else total
    return torch.from_numpy(total).to(first.dtype).reshape(first.shape)


def _fold_numbers(op: str, given: Sequence[Any]) -> Any:
    if isinstance(given[0], bool):
        if op == "XOR":
            return sum(given) % 2 == 1
        return any(given) if op in ("SUM", "MAX", "OR") else all(given)
    if op in ("MIN", "MAX"):  # NaN wins, and -0.0 is below 0.0
        ordered = sorted(given, key=lambda x: (x, math.copysign(1, x)))
        return next((x for x in given if x != x), ordered[0 if op == "MIN" else -1])
    total = reduce(_STEPS[op], given)
    return total / len(given) if op == "MEAN" else total


def wrong(step: Step, rank: int, got: Any) -> str | None:
    """Return how a content differs from a step's right result on a rank, except by rounding."""
    has_none = rank not in step.members or (step.call == "reduce" and rank != step.root)
    if has_none or not step.is_near:
        return difference(got, expected(step, rank))
    described, number = [_only(step.values[member]) for member in step.members], _only(got)
    if not isinstance(described[0], Filled):
        mean = reduce(operator.add, described) / len(described)
        if not isinstance(mean, complex) and math.isfinite(mean):
            return difference(number, mean)
        kind = torch.complex128 if isinstance(mean, complex) else torch.float64
        number, *given = (torch.tensor([one], dtype=kind) for one in (number, *described))
        return _wrong_mean(number, given)
    if not (number.is_floating_point() or number.is_complex()):
        return _wrong_integers(step, number, described)
    is_made_float = step.call in ("reduce_mean", "reduce_dict") and _is_whole(described[0])
    dtype = torch.float32 if is_made_float else getattr(torch, described[0].dtype)
    given = [one.make() for one in described]
    if step.call == "reduce_scatter":
        given = [one.chunk(len(given))[step.members.index(rank)] for one in given]
    if number.dtype is not dtype or number.numel() != given[0].numel():
        return f"got {number.numel()} of {number.dtype}"
    return _wrong_mean(number, given)


def _only(value: Any) -> Any:
    """Return the one value of a list or dict."""
    values = value.values() if isinstance(value, dict) else value
    return next(iter(values)) if isinstance(value, (list, dict)) else value


def _is_whole(value: Filled) -> bool:
    return all(isinstance(x, int) for x in value.row)


def _wrong_integers(step: Step, got: Tensor, given: Sequence[Filled]) -> str | None:
    columns = zip(*(one.row for one in given), strict=True)
    means = [Fraction(sum(column), len(given)) for column in columns]
    is_cut = got.numel() and any(mean.denominator > 1 for mean in means)
    if is_cut and not step.call.startswith("mm."):
        return f"{means} was not refused"
    row = tuple(map(math.trunc, means))  # as mmengine truncates means
    return difference(got, Filled(row, given[0].dtype, given[0].shape).make())


def _wrong_mean(got: Tensor, given: Sequence[Tensor]) -> str | None:
    """Compare with the mean of tensors, except for the rounding of the dtype."""

    def wide(tensor: Tensor) -> Any:
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        tensor = tensor.double() if tensor.is_floating_point() else tensor
        return tensor.reshape(-1).numpy().astype(np.longdouble)

    count, kind, found = len(given), torch.finfo(got.dtype), wide(got)
    terms = np.stack([wide(one) for one in given])
    with np.errstate(invalid="ignore"):  # the sum of infinities of both signs
        true = terms.sum(0) / count
        bound = (kind.eps * abs(terms).max(0) + kind.smallest_normal * kind.eps) * count
        is_near = np.isfinite(true) & (abs(found - true) <= bound)
    is_right = is_near | (found == true) | (np.isnan(found) & np.isnan(true))
    if is_right.all():
        return None
    at = int(is_right.argmin())
    return f"{found[at]!r} is not the mean of {terms[:, at]!r}"
