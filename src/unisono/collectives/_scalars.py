"""Reductions of numbers and of containers: one exchange, then one all_reduce for each dtype."""

from __future__ import annotations

import contextlib
import numbers
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as carriers
from unisono.collectives._exact_sums import check_summable, sum_exactly
from unisono.collectives.call import ranks_of, swap
from unisono.context import ContextState
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.model.reduction import Number, ReduceOp, fold_numbers, sum_numbers_exactly
from unisono.payload.codec import encode, failure, raise_failures, reason
from unisono.payload.pytree import survey, unflatten
from unisono.topology import Group
from unisono.tracebacks import hides

__tracebackhide__ = hides


_PLAIN = {bool: "?", int: "q", float: "d", complex: "D"}
_BOOLS_OF_NUMPY = (("numpy", "bool"), ("numpy", "bool_"))  # until numpy 2: bool_
_HEAD = struct.Struct("<cII")
_TAG = b"v"
_ALONE = {
    kind: (_PLAIN[kind].encode(), struct.Struct(f"{_HEAD.format}c{_PLAIN[kind]}"))
    for kind in (bool, int, float)
}


def _number(value: object) -> Number | None:
    """Return a python number for whatever counts as one without loss, else None."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Rational) or not isinstance(value, numbers.Complex):
        kind = type(value)
        return bool(value) if (kind.__module__, kind.__name__) in _BOOLS_OF_NUMPY else None
    number = float(value) if isinstance(value, numbers.Real) else complex(value)
    # What is wider than a double, such as np.longdouble, may lose digits. NaN is never equal.
    if number != value and value == value:
        raise PayloadError(
            f"a {type(value).__qualname__} of {value!r} doesn't fit into a "
            f"{type(number).__name__}: round it yourself"
        )
    return number


def reduce_values(
    context: ContextState, call: str, value: Any, op: ReduceOp, group: Group | None
) -> Any:
    """Reduce a number or a container. Collective over `group`."""
    columns, leaves, tensors = _compared(context, call, value, _Reduction(op), group)
    totals = _reduce_fused(context, tensors, op, group) if tensors else []
    return _rebuilt(value, leaves, [fold_numbers(op, column) for column in columns], totals)


def sum_values(
    context: ContextState, call: str, value: Any, group: Group | None, *, are_terms: bool = False
) -> Any:
    """Sum tensors, numbers or containers exactly. Collective over `group`."""
    how = _ExactTerms() if are_terms else _ExactSum()
    columns, leaves, tensors = _compared(context, call, value, how, group)
    terms = tensors if are_terms else [tensor.unsqueeze(0) for tensor in tensors]
    totals = sum_exactly(context, call, terms, group) if terms else []
    return _rebuilt(value, leaves, [sum_numbers_exactly(column) for column in columns], totals)


class _Reduction:
    """What is asked of a leaf."""

    def __init__(self, op: ReduceOp) -> None:
        self.op = op

    def look_at(self, tensor: Tensor, path: str) -> str:
        """Refuse a tensor, or say what must be the same on all ranks."""
        carriers.check_reducible(tensor, self.op)
        return f"{tensor.dtype}{list(tensor.shape)}"

    def look_at_number(self, value: Number, path: str) -> None:
        """Refuse a number."""


class _ExactSum(_Reduction):
    def __init__(self) -> None:
        super().__init__(ReduceOp.SUM)

    def look_at(self, tensor: Tensor, path: str) -> str:
        found = super().look_at(tensor, path)
        check_summable(tensor)
        return found


class _ExactTerms(_ExactSum):
    """All have the same number of terms, which other ranks may have more or less of."""

    def __init__(self) -> None:
        super().__init__()
        self._count: int | None = None

    def look_at(self, tensor: Tensor, path: str) -> str:
        super().look_at(tensor, path)
        if tensor.dim() == 0:
            raise PayloadError(f"the tensor{_at(path)} has no dim 0, which counts the terms")
        if self._count not in (None, tensor.shape[0]):
            raise PayloadError(
                f"the tensor{_at(path)} has {tensor.shape[0]} terms, others have {self._count}: "
                "dim 0 must be the same for all tensors of a rank"
            )
        self._count = tensor.shape[0]
        return f"{tensor.dtype}{list(tensor.shape[1:])}"

    def look_at_number(self, value: Number, path: str) -> None:
        raise PayloadError(
            f"a {type(value).__name__}{_at(path)} isn't a tensor: stack the terms along dim 0"
        )


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _compared(
    context: ContextState, call: str, value: Any, how: _Reduction, group: Group | None
) -> tuple[list[tuple[Number, ...]], list[Any], list[Tensor]]:
    """Return the numbers of all ranks, leaf by leaf, this rank's leaves, and its tensors."""
    # Collective over `group`.
    frame, leaves, tensors = _describe(value, how)
    frames = swap(context, call, frame, group)
    ranks = partial(ranks_of, context, group)
    raise_failures(frames, ranks, call)
    structures, values = zip(*map(_read, frames), strict=True)
    _check_alike(structures, ranks, call)
    return list(zip(*values, strict=True)), leaves, tensors


def _rebuilt(value: Any, leaves: list[Any], numbers_: list[Any], totals: list[Tensor]) -> Any:
    """Return a container as `value` with the results in it."""
    results = numbers_
    if totals:
        scalars, tensors = iter(numbers_), iter(totals)
        results = [next(tensors) if isinstance(leaf, Tensor) else next(scalars) for leaf in leaves]
    return unflatten(value, results)


def _describe(value: Any, how: _Reduction) -> tuple[bytes, list[Any], list[Tensor]]:
    """Return the frame of this rank, its leaves and its tensors."""
    # The frame: a tag, the lengths of structure and kinds as uint32, both, then the numbers as
    # ``struct`` packs them by their kinds, little-endian.
    if type(value) in _ALONE and not isinstance(how, _ExactTerms):
        kind, shape = _ALONE[type(value)]
        with contextlib.suppress(struct.error):  # out of range, which is told below
            return shape.pack(_TAG, 0, 1, kind, value), [value], []
    try:
        leaves, paths, structure = survey(value)
        values: list[Number] = []
        tensors: list[Tensor] = []
        kinds = ""
        for leaf, path in zip(leaves, paths, strict=True):
            number = leaf if type(leaf) in _PLAIN else _number(leaf)
            if number is not None:
                how.look_at_number(number, path)
                kinds += _PLAIN[type(number)]
                structure.append(path)
                values.append(number)
            elif isinstance(leaf, Tensor):
                structure.append(f"{path} {how.look_at(leaf, path)}")
                tensors.append(leaf)
            else:
                raise PayloadError(f"a {type(leaf).__qualname__}{_at(path)} can't be reduced")
        text = "\n".join(structure).encode("utf-8", "surrogatepass")
        head = _HEAD.pack(_TAG, len(text), len(kinds)) + text + kinds.encode()
        return head + _pack(kinds, values), leaves, tensors
    except Exception as error:  # the user's reprs, properties and __float__ may raise anything
        return failure(reason(error)), [], []


def _pack(kinds: str, values: list[Number]) -> bytes:
    if "D" in kinds:
        values = [part for value in values for part in _halves(value)]
    try:
        return struct.pack("<" + kinds.replace("D", "dd"), *values)
    except struct.error:
        for value in values:
            encode(value)  # says which one is out of range
        raise


def _halves(value: Number) -> tuple[Number, ...]:
    return (value.real, value.imag) if isinstance(value, complex) else (value,)


def _read(frame: bytes) -> tuple[bytes, list[Number]]:
    """Return the structure of a rank's value and its numbers."""
    _, width, count = _HEAD.unpack_from(frame)
    start = _HEAD.size
    end = start + width
    kinds = str(frame[end : end + count], "ascii")
    shape = "<" + kinds
    if "D" not in kinds:
        return bytes(frame[start:end]), list(struct.unpack_from(shape, frame, end + count))
    values: list[Number] = list(struct.unpack_from(shape.replace("D", "dd"), frame, end + count))
    for i, kind in enumerate(kinds):
        if kind == "D":
            values[i : i + 2] = [complex(*values[i : i + 2])]
    return bytes(frame[start:end]), values


def _check_alike(
    structures: Sequence[bytes], ranks: Callable[[], Sequence[int]], call: str
) -> None:
    if structures.count(structures[0]) == len(structures):
        return
    listed = [structure.decode("utf-8", "surrogatepass").split("\n") for structure in structures]
    differences = []
    for rank, structure in zip(ranks(), listed, strict=True):
        other = listed[0] if structure != listed[0] else listed[-1]
        extra = [leaf for leaf in structure if leaf not in other] or structure
        differences.append(f"rank {rank} has {', '.join(extra[:3]) or 'a number'}")
    raise CollectiveMismatchError(
        f"{call} of values of different structure: {'; '.join(differences)}"
    )


def _reduce_fused(
    context: ContextState, tensors: list[Tensor], op: ReduceOp, group: Group | None
) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        flat = torch.cat([carriers.own(context, tensors[i]).reshape(-1) for i in places])
        total = carriers.all_reduce(context, flat, op, group, flat.device)
        parts = torch.split(total, [tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            results[i] = part.reshape(tensors[i].shape).to(tensors[i].device, copy=True)
    return [results[i] for i in range(len(tensors))]
