"""Agreement of ranks on a list of tensors, and detection of shared memory in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.collectives.call import exchange_blobs
from unisono.context import ContextState
from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.payload.codec import decode, encode, failure, raise_failures
from unisono.payload.tensors import is_dense, reach_bytes
from unisono.topology import Group
from unisono.training.buckets import Work

OVERLAPS = -1
"""The owner of a tensor that overlaps another in part, or itself."""


class _Span(NamedTuple):  # faster than a dataclass, as each step creates one for each tensor
    """The memory of a tensor in a list."""

    device: str
    begin: int
    end: int
    position: int  # in the list
    tensor: Tensor


def aliases(items: Sequence[object], tensors: Sequence[Tensor | None]) -> list[int]:
    """Return for each tensor the index of the tensor that owns its memory, or `OVERLAPS`."""
    # `items` are the listed objects, such as parameters; `tensors` may be their gradients.
    first_with: dict[int, int] = {}
    owners = [first_with.setdefault(id(item), index) for index, item in enumerate(items)]
    spans = []
    for index, tensor in enumerate(tensors):
        if tensor is None or owners[index] != index or not tensor.numel():
            continue
        begin, size = tensor.data_ptr(), reach_bytes(tensor)
        if size < tensor.nbytes:  # its own elements share memory
            owners[index] = OVERLAPS
        elif begin:  # tensors without an address are compared by identity only
            spans.append(_Span(str(tensor.device), begin, begin + size, index, tensor))
    # Of spans with the same begin, the longest comes first, as it owns the memory of the others.
    spans.sort(key=lambda span: (span.device, span.begin, -span.end, span.position))
    owner: _Span | None = None
    for span in spans:
        if owner is None or span.device != owner.device or span.begin >= owner.end:
            owner = span
            continue
        is_within = span.end <= owner.end and span.tensor.dtype is owner.tensor.dtype
        # An owner with gaps, such as a column, doesn't own all memory within its span.
        has_no_gaps = owner.end - owner.begin == owner.tensor.nbytes
        owners[span.position] = owner.position if is_within and has_no_gaps else OVERLAPS
    # A tensor that is listed twice has the owner of its first entry.
    return [index if index == OVERLAPS else owners[index] for index in owners]


_NONE = b"n"
_SPARSE, _SHARDED, _NO_MEMORY, _OVERLAPPING = b"s", b"h", b"f", b"v"
_REFUSED = {
    _SPARSE: ("is sparse", "use sparse=False, or make it dense with to_dense()"),
    _SHARDED: (
        "is sharded, a DTensor",
        "each rank has a part of it; give its to_local() or full_tensor(). Under fully_shard "
        "backward averages the gradients itself",
    ),
    _NO_MEMORY: ("has no memory of its own", "give a plain tensor"),
    _OVERLAPPING: (
        "overlaps another tensor of the list in memory, or itself",
        "leave one of the two out, or give a clone(), or the tensor that both are views of",
    ),
}
_ORDERS = (  # code, memory format, and the number of dimensions that the format needs
    (b"c", torch.contiguous_format, None),
    (b"l", torch.channels_last, 4),
    (b"d", torch.channels_last_3d, 5),
)
_OTHER_ORDER = b"o"
_LIST = b"l"
_DIGEST_BYTES = 16
_START = len(_LIST) + _DIGEST_BYTES


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def is_integer(value: Any) -> bool:
    """Return whether a value is a dense tensor of integers or bools."""
    return is_dense(value) and not (value.is_floating_point() or value.is_complex())


def as_tensors(params: object) -> list[Tensor]:
    """List the tensors of a module's parameters, a tensor, a dict or any iterable."""
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, Tensor):
        return [params]
    values = params.values() if isinstance(params, Mapping) else params
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


def _code(tensor: Tensor | None, owner: int) -> bytes:
    """Return the code of a tensor's memory order, or of the reason to reject it."""
    if tensor is None:
        return _NONE
    if is_sharded(tensor):
        return _SHARDED
    if not is_dense(tensor):
        return _SPARSE if tensor.layout is not torch.strided else _NO_MEMORY
    if owner == OVERLAPS:
        return _OVERLAPPING
    for code, memory_format, dims in _ORDERS:
        if dims in (None, tensor.dim()) and tensor.is_contiguous(memory_format=memory_format):
            return code
    return _OTHER_ORDER


def _line(index: int, like: Tensor, owner: int) -> str:
    """Describe a tensor of the list; ranks compare these lines."""
    text = f"{like.dtype}{'[nested]' if like.is_nested else list(like.shape)}"
    return text if owner in (index, OVERLAPS) else f"{text}, the memory of tensor {owner}"


def agree(
    context: ContextState,
    call: str,
    params: object,
    group: Group | None = None,
    *,
    of_grads: bool = False,
) -> list[Work]:
    """Check that all ranks list the same tensors; return the tensors, or gradients, to send."""
    # Collective over `group`: one exchange, and a second one if the lists differ.
    likes: list[Tensor] = []
    error: ArgumentError | None = None
    try:
        likes = as_tensors(params)
    except ArgumentError as raised:
        error = raised
    except Exception as raised:  # the user's own iterable may raise anything
        error = ArgumentError(f"the tensors can't be listed: {type(raised).__name__}: {raised}")
    tensors: list[Tensor | None] = [*likes]
    if of_grads:
        tensors = [like.grad if like.requires_grad else None for like in likes]
    owners = aliases(likes, [item if is_dense(item) else None for item in tensors])
    lines = [_line(i, *each) for i, each in enumerate(zip(likes, owners, strict=True))]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).digest()
    blob = _LIST + digest + b"".join(map(_code, tensors, owners))
    frames = exchange_blobs(context, call, blob if error is None else failure(str(error)), group)
    if error is not None:
        # Raised after the exchange, so that the other ranks raise, too.
        raise error
    ranks = list(context.model.topology.members(group))
    raise_failures(frames, lambda: ranks, call)
    if any(frame[:_START] != blob[:_START] for frame in frames):
        blobs = exchange_blobs(context, f"{call}: the lists differ", encode(lines), group)
        lists = [decode(blob, context.model.device) for blob in blobs]
        raise CollectiveMismatchError(_difference(call, lists, ranks))
    columns = list(zip(*(frame[_START:] for frame in frames), strict=True))
    for index, column in enumerate(columns):
        _check(column, f"tensor {index} of {len(lines)} ({lines[index]})", call, ranks)
    return _works(likes, owners, columns, of_grads)


def _works(
    likes: Sequence[Tensor], owners: Sequence[int], columns: Sequence[Sequence[int]], of_grads: bool
) -> list[Work]:
    """Return the tensors that some rank has, without aliases; zeros for a missing gradient."""
    works: list[Work] = []
    for index, (like, column) in enumerate(zip(likes, columns, strict=True)):
        codes = set(column)
        if owners[index] != index or codes == {_NONE[0]}:  # an alias changes with its owner
            continue
        if of_grads and like.grad is None:  # another rank has a gradient
            like.grad = torch.zeros_like(like)
        tensor: Any = like.grad if of_grads else like
        # Memory can be sent as it lies if all ranks have the same order, without gaps.
        works.append((tensor, len(codes) == 1 and _OTHER_ORDER[0] not in codes))
    return works


def _check(column: Sequence[int], name: str, call: str, ranks: Sequence[int]) -> None:
    """Raise if some rank cannot reduce a tensor in place."""
    for code, (kind, remedy) in _REFUSED.items():
        if code[0] in column:
            where = [rank for rank, other in zip(ranks, column, strict=True) if other == code[0]]
            raise PayloadError(
                f"{call} takes dense tensors, but {name} {kind} on ranks {where}: {remedy}"
            )


def _difference(call: str, lists: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Return an error text about the first tensor that differs between the ranks' lists."""
    longest = max(len(lines) for lines in lists)
    padded = [[*lines, *["nothing"] * (longest - len(lines))] for lines in lists]
    index = next(i for i, column in enumerate(zip(*padded, strict=True)) if len(set(column)) > 1)
    shown = [
        f"rank {rank} has {there[index]} there ({len(lines)} in all)"
        for rank, there, lines in zip(ranks, padded, lists, strict=True)
    ]
    return (
        f"{call}: the lists differ between ranks from tensor {index} on: {'; '.join(shown)}: give "
        "every rank the same tensors in the same order"
    )
