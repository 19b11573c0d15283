"""Reductions of numbers and of containers: one exchange, then one all_reduce for each dtype."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from unisono.collectives import _dtype_emulation as emulation
from unisono.collectives._exact_sums import check_summable, sum_exactly
from unisono.collectives.call import exchange_blobs
from unisono.context import ContextState
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.model.reduction import Number, ReduceOp, fold_numbers, sum_numbers_exactly
from unisono.payload.codec import decode_all, encode, frame_or_reason
from unisono.payload.pytree import survey, unflatten
from unisono.payload.tensors import plain
from unisono.topology import Group

_PLAIN = bool, int, float, complex  # no set, as a class of a user may have no hash
_BOOLS_OF_NUMPY = (("numpy", "bool"), ("numpy", "bool_"))  # until numpy 2: bool_
_CPU = torch.device("cpu")
_add_rows: Callable[..., Any] = partial(map, add)  # leaf by leaf, as `fold_numbers` adds them
_INTS = range(-(1 << 63), 1 << 63)  # the limit for an int without a container, too
TensorCheck = Callable[[Tensor, str], str]
"""Rejects a tensor at a path, or returns the properties that must be equal on all ranks."""


def _number(value: object) -> Number | None:
    """Return a python number equal to `value`, None if it isn't a number."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Rational) or not isinstance(value, numbers.Complex):
        # A Fraction may not be exact as a float; numpy's bool isn't registered in `numbers`.
        kind = type(value)
        return bool(value) if (kind.__module__, kind.__name__) in _BOOLS_OF_NUMPY else None
    number = float(value) if isinstance(value, numbers.Real) else complex(value)
    # A type wider than a double, such as np.longdouble, may lose digits. NaN never equals itself.
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

    def check_tensor(tensor: Tensor, path: str) -> str:
        emulation.check_reducible(tensor, op)
        return f"{tensor.dtype}{list(tensor.shape)}"

    rows, leaves, tensors = _exchange_numbers(context, call, value, check_tensor, group)
    totals = _reduce_tensors(context, tensors, op, group) if tensors else []
    # As in `fold_numbers`, the first values decide: `+` is right for any that follow.
    if op is ReduceOp.SUM and {*map(type, rows[0])} <= {int, float}:
        scalars = list(reduce(_add_rows, rows))
    else:
        scalars = [fold_numbers(op, column) for column in zip(*rows, strict=True)]
    return scalars[0] if type(value) in _PLAIN else _rebuilt(value, leaves, scalars, totals)


def _reduce_tensors(
    context: ContextState, tensors: list[Tensor], op: ReduceOp, group: Group | None
) -> list[Tensor]:
    """Reduce tensors to new ones. Collective over `group`."""

    def as_row(tensor: Tensor) -> Tensor:
        return emulation.private_copy(context, tensor).reshape(-1)

    def reduce(row: Tensor) -> Tensor:
        return emulation.all_reduce(context, row, op, group, is_ours=True)

    return _reduce_joined(tensors, [tensor.shape for tensor in tensors], as_row, reduce)


def sum_values(
    context: ContextState, call: str, value: Any, group: Group | None, *, are_terms: bool = False
) -> Any:
    """Sum tensors, numbers or containers exactly. Collective over `group`."""
    counts: set[int] = set()  # the one size of dim 0 that this rank's tensors have

    def check_tensor(tensor: Tensor, path: str) -> str:
        emulation.check_reducible(tensor, ReduceOp.SUM)
        check_summable(tensor)
        if not are_terms:
            return f"{tensor.dtype}{list(tensor.shape)}"
        if tensor.dim() == 0:
            raise PayloadError(f"the tensor{_at(path)} has no dim 0, which counts the terms")
        if counts - {tensor.shape[0]}:
            raise PayloadError(
                f"the tensor{_at(path)} has {tensor.shape[0]} terms, other tensors have "
                f"{counts.pop()}: dim 0 must be the same for all tensors of a rank"
            )
        counts.add(tensor.shape[0])
        return f"{tensor.dtype}{list(tensor.shape[1:])}"

    def as_row(terms: Tensor) -> Tensor:  # [k, *shape] as [k, n], only read
        row = plain(terms).resolve_conj().resolve_neg().to(context.model.transport_device)
        return row.reshape(terms.shape[0], terms.shape[1:].numel())

    rows, leaves, tensors = _exchange_numbers(
        context, call, value, check_tensor, group, takes_numbers=not are_terms
    )
    terms = tensors if are_terms else [tensor.unsqueeze(0) for tensor in tensors]
    shapes = [each.shape[1:] for each in terms]
    totals = _reduce_joined(terms, shapes, as_row, partial(sum_exactly, context, call, group=group))
    scalars = [sum_numbers_exactly(column) for column in zip(*rows, strict=True)]
    return _rebuilt(value, leaves, scalars, totals)


def _at(path: str) -> str:
    """Return the words " at PATH" for a leaf of a container; empty for any other value."""
    return f" at {path}" if path else ""


def _exchange_numbers(
    context: ContextState,
    call: str,
    value: Any,
    check_tensor: TensorCheck,
    group: Group | None,
    *,
    takes_numbers: bool = True,
) -> tuple[Sequence[Sequence[Number]], list[Any], list[Tensor]]:
    """Return the numbers of each rank, this rank's leaves, and its tensors."""
    # Collective over `group`. A single number is sent as it is, other values with their structure.
    leaves: list[Any] = []
    tensors: list[Tensor] = []
    # An int of more than 64 bits goes to `_describe`, which rejects it with a remedy.
    if takes_numbers and type(value) in _PLAIN and (type(value) is not int or value in _INTS):
        leaves, frame = [value], frame_or_reason(encode, value)
    else:
        frame = frame_or_reason(_describe, value, check_tensor, takes_numbers, leaves, tensors)
    frames = exchange_blobs(context, call, frame, group)
    model = context.model
    decoded = decode_all(frames, lambda: model.topology.members(group), call, _CPU)
    if tuple not in map(type, decoded):  # a single number of each rank, without a structure
        return [*zip(decoded, strict=True)], leaves, tensors
    pairs = [each if type(each) is tuple else ("", (each,)) for each in decoded]
    structures, values = zip(*pairs, strict=True)
    _check_alike(structures, lambda: model.topology.members(group), call)
    return values, leaves, tensors


def _rebuilt(value: Any, leaves: list[Any], scalars: list[Any], tensors: list[Tensor]) -> Any:
    """Return a container like `value` that holds the results."""
    results = scalars
    if tensors:  # in the order of the leaves
        rest, totals = iter(scalars), iter(tensors)
        results = [next(totals) if isinstance(leaf, Tensor) else next(rest) for leaf in leaves]
    return unflatten(value, results)


def _describe(
    value: Any,
    check_tensor: TensorCheck,
    takes_numbers: bool,
    leaves: list[Any],
    tensors: list[Tensor],
) -> bytes:
    """Encode the structure of a value and its numbers, and list its leaves and tensors."""
    # Both lists are filled in place, because `frame_or_reason` returns only the frame.
    leaves[:], paths, structure = survey(value)  # a structure lists empty containers first
    values: list[Number] = []
    if takes_numbers and _are_plain(leaves):
        structure += paths
        return encode(("\n".join(structure), leaves))
    for leaf, path in zip(leaves, paths, strict=True):
        number = leaf if type(leaf) in _PLAIN else _number(leaf)
        if number is not None and takes_numbers:
            if type(number) is int and number not in _INTS:
                bits = number.bit_length()
                # All digits of a long int would fill the message.
                shown = number if bits < 200 else f"an int of {bits} bits"
                raise PayloadError(f"{shown}{_at(path)} doesn't fit into 64 bits: reduce a float")
            structure.append(path)  # without the type: ranks may mix int and float
            values.append(number)
        elif isinstance(leaf, Tensor):
            structure.append(f"{path} {check_tensor(leaf, path)}")
            tensors.append(leaf)
        elif number is not None:
            kind = type(number).__name__
            raise PayloadError(f"a {kind}{_at(path)} isn't a tensor: stack the terms along dim 0")
        else:
            raise PayloadError(f"a {type(leaf).__qualname__}{_at(path)} can't be reduced")
    return encode(("\n".join(structure), values))


def _are_plain(leaves: list[Any]) -> bool:
    """Return whether all leaves are numbers of Python, whose ints have at most 64 bits."""
    if not {*map(type, leaves)}.issubset(_PLAIN):
        return False
    return all(map(_INTS.__contains__, [leaf for leaf in leaves if type(leaf) is int]))


def _check_alike(structures: Sequence[str], ranks: Callable[[], Sequence[int]], call: str) -> None:
    """Raise on every rank if the structures of their values differ."""
    if structures.count(structures[0]) == len(structures):
        return
    listed = [structure.split("\n") for structure in structures]
    differences = []
    for rank, structure in zip(ranks(), listed, strict=True):
        # Each rank is compared with the first one, or with the last one if it equals the first.
        other = listed[0] if structure != listed[0] else listed[-1]
        # All leaves if only their order or number differs. A single number has none.
        extra = [leaf for leaf in structure if leaf not in other] or structure
        differences.append(f"rank {rank} has {', '.join(extra[:3]) or 'a number'}")
    raise CollectiveMismatchError(
        f"{call} of values of different structure: {'; '.join(differences)}"
    )


def _reduce_joined(
    tensors: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    as_row: Callable[[Tensor], Tensor],
    reduce: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Reduce tensors in one operation for each dtype, to results of these shapes."""
    # `as_row` flattens a tensor to [..., n], and `reduce` returns [n]. This is as collective as
    # `reduce` is.
    results: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        rows = [as_row(tensors[i]) for i in places]
        total = reduce(rows[0] if len(rows) == 1 else torch.cat(rows, -1))
        parts = torch.split(total, [row.shape[-1] for row in rows])
        for i, part in zip(places, parts, strict=True):
            # Copied: a part would keep the memory of all parts alive, and autograd refuses to
            # change an output of `split` in place.
            results[i] = part.reshape(shapes[i]).to(tensors[i].device, copy=True)
    return [results[i] for i in range(len(tensors))]
