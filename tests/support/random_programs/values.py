"""Values of random programs: described in the test, made on a rank, and compared there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.testing.cases import _law


@dataclass(frozen=True)
class Point:
    """A container of numbers and tensors."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Made:
    """The description of a value, which a rank makes itself."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def make(self) -> Any:
        return self.function(*self.args)


@dataclass(frozen=True)
class Filled:
    """A tensor filled with repetitions of one row of numbers."""

    row: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]

    def make(self) -> Tensor:
        numel = math.prod(self.shape)
        row = torch.tensor(self.row, dtype=getattr(torch, self.dtype))
        return row.repeat(-(-numel // len(row)))[:numel].reshape(self.shape)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a container with each of its values changed, and anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    return Point(change(value.x), change(value.y)) if type(value) is Point else value


def make(value: Any) -> Any:
    """Make the value of a description, also within containers."""
    return value.make() if isinstance(value, (Made, Filled)) else mapped(make, value)


_PARTS: dict[str, Callable[[Any], Any]] = {
    "Point": lambda point: (point.x, point.y),
    "ndarray": lambda array: array.tolist(),
    "DTensor": lambda tensor: tensor.to_local(),
    "TwoTensor": lambda tensor: tensor.a,
    "MaskedTensor": lambda tensor: [tensor.get_mask(), tensor.to_tensor(0)],
    "FakeTensor": lambda tensor: [str(tensor.dtype), list(tensor.shape)],
}
"""Parts of values that ``same`` can't compare, by class name, as ranks may not import them."""


def content(value: Any) -> Any:
    """Return a copy that ``same`` can compare: plain tensors with one kind of NaN and of zero."""
    return _law.quietly(_content, value)


def _content(value: Any) -> Any:
    name = type(value).__name__
    if name in _PARTS:
        return name, _content(_PARTS[name](value))
    if not isinstance(value, Tensor):
        return mapped(_content, value)
    if value.is_meta:
        return "meta", str(value.dtype), list(value.shape)
    if torch._is_functional_tensor(value):
        torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
        return _content(torch._from_functional_tensor(value))
    if value.is_nested:
        return "nested", [_content(part) for part in value.unbind()]
    if value.layout is not torch.strided:
        return str(value.layout), _content(value.to_dense())
    copy = value.detach().as_subclass(Tensor).resolve_neg()
    copy = copy.clone(memory_format=torch.contiguous_format)
    if copy.is_floating_point():  # NaN has many bits, and zero two
        copy.masked_fill_(copy.isnan(), torch.nan).add_(0.0)
    return copy


def difference(one: Any, other: Any) -> str | None:
    """Return how a content differs from the wanted one, None if it doesn't differ."""
    return _law.difference(one, other) or None
