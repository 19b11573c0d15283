"""Agreement of ranks on a list of tensors, and detection of shared memory in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.collectives.call import exchange_blobs
from unisono.context import ContextState
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.payload.codec import decode, encode, failure, raise_failures
from unisono.payload.tensors import is_dense, reach_bytes
from unisono.topology import Group

OVERLAPS = -1
"""The owner of a tensor that overlaps another in part, or itself."""


class _Span(NamedTuple):  # made for each tensor of a step, and faster than a dataclass
    """The memory of a tensor in a list."""

    device: str
    begin: int
    end: int
    position: int  # in the list
    tensor: Tensor


def aliases(names: Sequence[object], tensors: Sequence[Tensor | None]) -> list[int]:
    """Return for each tensor the index of the tensor that owns its memory, or `OVERLAPS`."""
    first_with: dict[int, int] = {}
    owners = [first_with.setdefault(id(name), index) for index, name in enumerate(names)]
    spans = []
    for index, tensor in enumerate(tensors):
        if tensor is None or owners[index] != index or not tensor.numel():
            continue
        begin, size = tensor.data_ptr(), reach_bytes(tensor)
        if size < tensor.nbytes:  # its own elements share memory
            owners[index] = OVERLAPS
        elif begin:  # tensors without an address are compared by identity only
            spans.append(_Span(str(tensor.device), begin, begin + size, index, tensor))
    # Of spans with one begin the longest comes first, as it owns the others.
    spans.sort(key=lambda span: (span.device, span.begin, -span.end, span.position))
    owner: _Span | None = None
    for span in spans:
        if owner is None or span.device != owner.device or span.begin >= owner.end:
            owner = span
            continue
        is_within = span.end <= owner.end and span.tensor.dtype is owner.tensor.dtype
        # An owner with gaps, such as a column, doesn't hold all elements within its span.
        has_no_gaps = owner.end - owner.begin == owner.tensor.nbytes
        owners[span.position] = owner.position if is_within and has_no_gaps else OVERLAPS
    # A tensor that is listed twice has the owner of its first entry.
    return [index if index == OVERLAPS else owners[index] for index in owners]


_NONE = b"n"
_SPARSE, _SHARDED, _FOREIGN, _OVERLAPPING = b"s", b"h", b"f", b"v"
_REFUSED = {
    _SPARSE: ("is sparse", "use sparse=False, or make it dense with to_dense()"),
    _SHARDED: (
        "is sharded, a DTensor",
        "each rank has a part of it; give its to_local() or full_tensor(). Under fully_shard "
        "backward averages the gradients itself",
    ),
    _FOREIGN: ("has no memory of its own", "give a plain tensor"),
    _OVERLAPPING: (
        "overlaps another one of the list in memory, or itself",
        "leave one of them out, or give a clone(), or the tensor that both are views of",
    ),
}
_LAYOUTS = (  # code, memory format, and the number of dimensions that it needs
    (b"c", torch.contiguous_format, None),
    (b"l", torch.channels_last, 4),
    (b"d", torch.channels_last_3d, 5),
)
_OTHER = b"o"
_LIST = b"l"
_DIGEST_BYTES = 16
_START = len(_LIST) + _DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Described:
    """The result of `agree`."""

    present: list[bool]  # whether any rank has the tensor
    layouts: list[torch.memory_format | None]  # None if memory orders differ
    alone: list[bool]  # whether it owns its memory


@dataclass(frozen=True, slots=True)
class Listed:
    """This rank's input of `agree`."""

    likes: Sequence[Tensor]
    tensors: Sequence[Tensor | None]
    error: ArgumentError | None = None


def listed(params: object, *, of_grads: bool = False) -> Listed:
    """List the tensors of `params`, or the gradients of those that have any."""
    try:
        likes = as_tensors(params)
    except ArgumentError as error:
        return Listed([], [], error)
    except Exception as error:  # the user's own iterable may raise anything
        text = f"it can't be listed: {type(error).__name__}: {error}"
        return Listed([], [], ArgumentError(text))
    if of_grads:
        return Listed(likes, [item.grad if item.requires_grad else None for item in likes])
    return Listed(likes, likes)


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def as_tensors(params: object) -> list[Tensor]:
    """List the tensors of a module's parameters, a tensor, a dict or any iterable."""
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    values = params.values() if isinstance(params, dict) else params
    if not isinstance(values, Iterable):
        raise ArgumentError(
            f"a module or an iterable of tensors is needed, not a {type(params).__qualname__}"
        )
    tensors = list(values)
    wrong = [i for i, item in enumerate(tensors) if not isinstance(item, Tensor)]
    if wrong:
        kind = type(tensors[wrong[0]]).__qualname__
        raise ArgumentError(f"item {wrong[0]} is a {kind}: pass only tensors")
    return tensors


def _state(tensor: Tensor | None, owner: int) -> bytes:
    """Return the code of a tensor's memory order, or of the reason to reject it."""
    if tensor is None:
        return _NONE
    if is_sharded(tensor):
        return _SHARDED
    if not is_dense(tensor):
        return _SPARSE if tensor.layout is not torch.strided else _FOREIGN
    if owner == OVERLAPS:
        return _OVERLAPPING
    for code, layout, dims in _LAYOUTS:
        if dims in (None, tensor.dim()) and tensor.is_contiguous(memory_format=layout):
            return code
    return _OTHER


def _line(index: int, like: Tensor, owner: int) -> str:
    text = f"{like.dtype}{'[nested]' if like.is_nested else list(like.shape)}"
    return text if owner in (index, OVERLAPS) else f"{text}, the memory of tensor {owner}"


def agree(
    context: ContextState,
    call: str,
    listed: Listed,
    group: Group | None = None,
) -> Described:
    """Check that all ranks have the same list; return which tensors exist on any rank."""
    # Collective over `group`: one exchange, and another one where the lists differ.
    owners = aliases(listed.likes, [item if is_dense(item) else None for item in listed.tensors])
    lines = [_line(i, *each) for i, each in enumerate(zip(listed.likes, owners, strict=True))]
    states = b"".join(map(_state, listed.tensors, owners))
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).digest()
    blob = _LIST + digest + states if listed.error is None else failure(str(listed.error))
    frames = exchange_blobs(context, call, blob, group)
    if listed.error is not None:
        # Only now, so that the other ranks raise, too.
        raise listed.error
    ranks = list(context.model.topology.members(group))
    raise_failures(frames, lambda: ranks, call)
    if any(frame[:_START] != blob[:_START] for frame in frames):
        blobs = exchange_blobs(context, f"{call}: the lists differ", encode(lines), group)
        lists = [decode(blob, context.model.device) for blob in blobs]
        raise CollectiveMismatchError(_difference(call, lists, ranks))
    columns = list(zip(*(frame[_START:] for frame in frames), strict=True))
    for index, column in enumerate(columns):
        _check(column, f"tensor {index} of {len(lines)} ({lines[index]})", call, ranks)
    table = {code[0]: layout for code, layout, _ in _LAYOUTS}
    return Described(
        [any(code != _NONE[0] for code in column) for column in columns],
        [table.get(column[0]) if len(set(column)) == 1 else None for column in columns],
        [owner == index for index, owner in enumerate(owners)],
    )


def _check(column: Sequence[int], name: str, call: str, ranks: Sequence[int]) -> None:
    """Raise if some rank cannot reduce a tensor in place."""
    for code, (kind, remedy) in _REFUSED.items():
        if code[0] in column:
            where = [rank for rank, other in zip(ranks, column, strict=True) if other == code[0]]
            raise PayloadError(
                f"{call} takes dense tensors, but {name} {kind} on ranks {where}: {remedy}"
            )


def _difference(call: str, lists: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    longest = max(len(lines) for lines in lists)
    index = next(
        i for i in range(longest + 1) if len({tuple(lines[i : i + 1]) for lines in lists}) > 1
    )
    shown = [
        f"rank {rank} has {lines[index] if index < len(lines) else 'nothing'} there "
        f"({len(lines)} in all)"
        for rank, lines in zip(ranks, lists, strict=True)
    ]
    return (
        f"{call}: the lists differ between ranks from tensor {index} on: {'; '.join(shown)}: give "
        "every rank the same tensors in the same order"
    )
