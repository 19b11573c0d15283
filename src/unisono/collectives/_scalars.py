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
from unisono.collectives.call import ranks_of, swap
from unisono.context import ContextState
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.model.reduction import Number, ReduceOp, fold_numbers
from unisono.payload.codec import encode, failure, raise_failures, reason
from unisono.payload.pytree import survey, unflatten
from unisono.topology import Group
from unisono.tracebacks import hides

__all__ = ("reduce_values",)

__tracebackhide__ = hides


_PLAIN = {bool: "?", int: "q", float: "d", complex: "D"}
_HEAD = struct.Struct("<cII")
_TAG = b"v"
_ALONE = {
    kind: (_PLAIN[kind].encode(), struct.Struct(f"{_HEAD.format}c{_PLAIN[kind]}"))
    for kind in (bool, int, float)
}


def _number(value: object) -> Number | None:
    """Give a python number for whatever counts as one without loss, else None."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Rational) or not isinstance(value, numbers.Complex):
        return None
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
    frame, leaves, tensors = _describe(value, op)
    frames = swap(context, call, frame, group)
    ranks = partial(ranks_of, context, group)
    raise_failures(frames, ranks, call)
    structures, values = zip(*map(_read, frames), strict=True)
    _check_alike(structures, ranks, call)
    columns = zip(*values, strict=True)
    results: list[Any] = [fold_numbers(op, column) for column in columns]
    if tensors:
        numbers_, totals = iter(results), iter(_reduce_fused(context, tensors, op, group))
        results = [next(totals) if isinstance(leaf, Tensor) else next(numbers_) for leaf in leaves]
    return unflatten(value, results)


def _describe(value: Any, op: ReduceOp) -> tuple[bytes, list[Any], list[Tensor]]:
    """Give the frame of this rank, its leaves and its tensors.

    The frame: a tag, the lengths of structure and kinds as uint32, both, then the numbers as
    ``struct`` packs them by their kinds, little-endian.
    """
    if type(value) in _ALONE:
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
                kinds += _PLAIN[type(number)]
                structure.append(path)
                values.append(number)
            elif isinstance(leaf, Tensor):
                carriers.check_reducible(leaf, op)
                structure.append(f"{path} {leaf.dtype}{list(leaf.shape)}")
                tensors.append(leaf)
            else:
                place = f" at {path}" if path else ""
                raise PayloadError(f"a {type(leaf).__qualname__}{place} can't be reduced")
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
    """Give the structure of a rank's value and its numbers."""
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
