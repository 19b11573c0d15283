"""Reductions of numbers and of containers: one exchange, then one all_reduce for each dtype."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from unisono._tree import flatten, unflatten
from unisono.collectives import _carriers as carriers
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.model import ComputationModel
from unisono.payload import decode, encode, failure, raise_failures
from unisono.reduction import Number, ReduceOp, fold_numbers
from unisono.topology import Group

__all__ = ("reduce_values",)


def _number(value: object) -> Number | None:
    """Give a python number for whatever counts as one without loss, else None."""
    if isinstance(value, (bool, numbers.Integral)):
        return value if isinstance(value, bool) else int(value)
    if isinstance(value, numbers.Rational):
        return None
    if isinstance(value, numbers.Real):
        return float(value)
    return complex(value) if isinstance(value, numbers.Complex) else None


def reduce_values(model: ComputationModel, value: Any, op: ReduceOp, group: Group | None) -> Any:
    """Reduce a number or a container. Collective over `group`."""
    frame, leaves, tensors = _describe(value, op)
    frames = model.exchange(frame, group)
    ranks = model.members(group)
    raise_failures(frames, ranks, f"all_reduce {op.name}")
    said = [decode(other, model.device) for other in frames]
    _check_alike([structure for structure, _ in said], ranks, op)
    columns = zip(*(values for _, values in said), strict=True)
    numbers_ = iter([fold_numbers(op, column) for column in columns])
    totals = iter(_reduce_fused(model, tensors, op, group))
    results = [next(totals) if isinstance(leaf, Tensor) else next(numbers_) for leaf in leaves]
    return unflatten(value, results)


def _describe(value: Any, op: ReduceOp) -> tuple[bytes, list[Any], list[Tensor]]:
    """Give the frame of this rank (its structure and numbers), its leaves and its tensors."""
    try:
        leaves, paths = flatten(value)
        structure = []
        values = []
        for leaf, path in zip(leaves, paths, strict=True):
            if isinstance(leaf, Tensor):
                carriers.check_reducible(leaf, op)
                structure.append(f"{path} {leaf.dtype}{list(leaf.shape)}")
                continue
            number = _number(leaf)
            if number is None:
                place = f" at {path}" if path else ""
                raise PayloadError(f"a {type(leaf).__qualname__}{place} can't be reduced")
            encode(number)
            structure.append(f"{path} number")
            values.append(number)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return encode((structure, values)), leaves, tensors
    except (PayloadError, RecursionError) as error:
        return failure(str(error)), [], []


def _check_alike(structures: list[list[str]], ranks: Any, op: ReduceOp) -> None:
    if all(structure == structures[0] for structure in structures):
        return
    said = []
    for rank, structure in zip(ranks, structures, strict=True):
        other = structures[0] if structure != structures[0] else structures[-1]
        extra = [leaf for leaf in structure if leaf not in other] or structure
        said.append(f"rank {rank} has {', '.join(extra[:3]) or 'nothing'}")
    raise CollectiveMismatchError(
        f"all_reduce {op.name} of values of different structure: {'; '.join(said)}"
    )


def _reduce_fused(
    model: ComputationModel, tensors: list[Tensor], op: ReduceOp, group: Group | None
) -> list[Tensor]:
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        flat = torch.cat([carriers.own(model, tensors[i]).reshape(-1) for i in places])
        total = carriers.all_reduce(model, flat, op, group)
        parts = torch.split(total, [tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            results[i] = part.reshape(tensors[i].shape).to(tensors[i].device, copy=True)
    return [results[i] for i in range(len(tensors))]
