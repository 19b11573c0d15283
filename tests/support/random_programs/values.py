"""Values of random programs: described in the test, made on a rank, and compared there."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import unisono
from unisono.testing.cases._law import same


class Made:
    """The description of a value, which a rank makes itself."""

    def make(self) -> Any:
        raise NotImplementedError


class Unusual(Made):
    """The description of a value of which the oracle needs the content."""


@dataclass(frozen=True)
class Point:
    """A container of numbers and tensors."""

    x: Any
    y: Any


@dataclass(frozen=True)
class Text(Made):
    """A long text, or bytes, of one piece again and again."""

    piece: str | bytes
    times: int

    def make(self) -> str | bytes:
        return self.piece * self.times


@dataclass(frozen=True)
class Filled(Made):
    """A tensor of one row of numbers again and again."""

    row: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]

    def make(self) -> Tensor:
        numel = math.prod(self.shape)
        row = torch.tensor(self.row, dtype=getattr(torch, self.dtype))
        return row.repeat(-(-numel // len(row)))[:numel].reshape(self.shape)


OVERLAPS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "twice": lambda base: [base, base],
    "three times": lambda base: [base, base, base],
    "an alias": lambda base: [base, base.view_as(base)],
    "another shape": lambda base: [base, base.view(2, -1)],
    "a transpose": lambda base: [base.view(2, -1), base.view(2, -1).t()],
    "a part": lambda base: [base, base[: base.numel() // 2]],
    "a part first": lambda base: [base[base.numel() // 2 :], base],
    "two halves and a bit": lambda base: [base[: base.numel() // 2 + 1], base[base.numel() // 2 :]],
    "every other": lambda base: [base, base[::2]],
    "one element": lambda base: [base, base[0]],
    "two halves": lambda base: [base[: base.numel() // 2], base[base.numel() // 2 :]],
    "evens and odds": lambda base: [base[::2], base[1::2]],
}
"""Lists of tensors over one piece of memory [even]."""
APART = ("two halves", "evens and odds")
"""Those in which no element comes twice."""


@dataclass(frozen=True)
class Overlap(Unusual):
    """Tensors that share memory, or copies of them, which may differ."""

    how: str
    numel: int
    dtype: str
    start: int
    are_copies: bool
    is_torn: bool
    is_dict: bool

    def make(self) -> Any:
        # Multiples of 6, so that means over two and three ranks are whole and exact.
        base = ((torch.arange(self.numel) % 3 + self.start) * 6).to(getattr(torch, self.dtype))
        tensors = OVERLAPS[self.how](base)
        if self.are_copies:
            torn = 6 if self.is_torn else 0
            tensors = [tensor.clone() + torn * i for i, tensor in enumerate(tensors)]
        return {f"p{i}": tensor for i, tensor in enumerate(tensors)} if self.is_dict else tensors


# Values that raise


def _boom(*_: object) -> Any:
    raise ArithmeticError("from within a value")


def _boom_on(rank: int) -> str:
    return str(_boom()) if unisono.get_rank() == rank else "read"


def _raising(base: type, *names: str) -> Any:
    """Make a subclass of which some methods raise."""
    return type("Raising", (base,), dict.fromkeys(names, _boom))


@dataclass
class _Reduced:
    """A value that is written as a call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return self.function, self.args


class _Recurses:
    def __reduce__(self) -> Any:
        return list, ([_Recurses()],)


@dataclass
class _Record:
    x: int
    __reduce_ex__ = _boom

    def __getattribute__(self, name: str) -> Any:
        return _boom() if name == "x" else super().__getattribute__(name)


class _Torch(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _boom()


def _nested_deeply() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


RAISING: dict[str, Callable[[int], Any]] = {
    "reduce": lambda _: _raising(object, "__reduce_ex__")(),
    "a list of reduce": lambda _: [1, (_raising(object, "__reduce_ex__")(),)],
    "recursion": lambda _: _Recurses(),
    "depth": lambda _: _nested_deeply(),
    "opens badly": lambda _: _Reduced(_boom, ()),
    "opens badly elsewhere": lambda rank: _Reduced(_boom_on, (rank,)),
    "key": lambda _: {_raising(object, "__repr__", "__reduce_ex__")(): 1.0},
    "float": lambda _: _raising(float, "__float__", "__reduce_ex__")(1.0),
    "a dict of float": lambda _: {"a": _raising(float, "__float__", "__reduce_ex__")(1.0)},
    "int": lambda _: _raising(int, "__int__", "__index__", "__reduce_ex__")(1),
    "list": lambda _: _raising(list, "__iter__", "__len__")([1]),
    "dict": lambda _: _raising(dict, "items", "keys", "__iter__")(a=1),
    "torch": lambda _: torch.ones(3).as_subclass(_Torch),
    "record": lambda _: object.__new__(_Record),
}
"""Values that raise while they are written or read, made for the rank that has them."""


@dataclass(frozen=True)
class Raises(Made):
    """A value of ``RAISING``."""

    kind: str
    rank: int

    def make(self) -> Any:
        return RAISING[self.kind](self.rank)


# What is done with all of them


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a container with each of its values changed, and anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    if type(value) is Point:
        return Point(change(value.x), change(value.y))
    return value


def make(value: Any) -> Any:
    """Make what is described, within containers too."""
    return value.make() if isinstance(value, Made) else mapped(make, value)


def content(value: Any) -> Any:
    """Return a copy of a value that ``same`` compares: plain tensors of one NaN and one zero."""
    if isinstance(value, Tensor):
        # Imported where there is an odd one: it takes a new process half a second.
        odd_tensors = sys.modules.get(f"{__package__}.odd_tensors")
        return plain(value) if odd_tensors is None else odd_tensors.content_of_tensor(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if type(value) is Point:
        return content((value.x, value.y))
    return mapped(content, value)


def plain(value: Tensor) -> Tensor:
    """Return a contiguous copy of a dense tensor."""
    copy = value.detach().as_subclass(Tensor).resolve_neg()
    copy = copy.clone(memory_format=torch.contiguous_format)
    if copy.is_floating_point():  # NaN has many bits, and zero two
        copy.masked_fill_(copy.isnan(), torch.nan).add_(0.0)
    return copy


def difference(one: Any, other: Any) -> str | None:
    """Return how a content differs from the one that is wanted, None if it doesn't."""
    try:
        same(one, other)
    except AssertionError as error:
        return str(error)
    return None
