"""Lists of tensors that must be alike on every rank: checked in one exchange, never by hanging."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unisono.errors import ArgumentError, CollectiveMismatchError, PayloadError
from unisono.model import ComputationModel
from unisono.payload import decode, encode, is_dense
from unisono.topology import Group

__all__ = ("Described", "agree", "as_tensors")

_NONE, _SPARSE = b"n", b"s"
_LAYOUTS = (
    (b"c", torch.contiguous_format),
    (b"l", torch.channels_last),
    (b"d", torch.channels_last_3d),
)
_OTHER = b"o"
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Described:
    """What `agree` found out.

    Args:
        present: for each tensor whether some rank has it.
        layouts: for each tensor its memory format where all ranks have it in the same one, so that
            its memory may be reduced as it lies; else None.
    """

    present: list[bool]
    layouts: list[torch.memory_format | None]


def as_tensors(params: object) -> list[Tensor]:
    """List the tensors of a module's parameters, a tensor, a dict or any iterable.

    Local.

    Raises:
        ArgumentError: it is no such thing.
    """
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
        raise ArgumentError(f"item {wrong[0]} is a {kind}: give tensors alone")
    return tensors


def _layout(tensor: Tensor) -> bytes:
    for code, layout in _LAYOUTS:
        rank = {b"c": None, b"l": 4, b"d": 5}[code]
        if rank in (None, tensor.dim()) and tensor.is_contiguous(memory_format=layout):
            return code
    return _OTHER


def _state(tensor: Tensor | None) -> bytes:
    if tensor is None:
        return _NONE
    return _layout(tensor) if is_dense(tensor) else _SPARSE


def _line(like: Tensor) -> str:
    return f"{like.dtype}{list(like.shape)}"


def agree(
    model: ComputationModel,
    call: str,
    likes: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    group: Group | None = None,
) -> Described:
    """See that every rank has the same list, and which of its tensors are there.

    Collective over `group`: one exchange, and another one where the lists differ.

    Args:
        model: the active model.
        call: what is done, for messages.
        likes: what the tensors look like.
        tensors: the tensors themselves, None where this rank has none, such as no gradient.
        group: the ranks that take part.

    Returns:
        What can be done with them.

    Raises:
        CollectiveMismatchError: the lists differ; names the first difference by rank (on every
            rank).
        PayloadError: a tensor is sparse somewhere; names it by rank (on every rank).
    """
    lines = [_line(like) for like in likes]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=_DIGEST_BYTES).digest()
    frames = model.exchange(digest + b"".join(map(_state, tensors)), group)
    ranks = list(model.members(group))
    if any(frame[:_DIGEST_BYTES] != digest for frame in frames):
        said = [decode(blob, model.device) for blob in model.exchange(encode(lines), group)]
        raise CollectiveMismatchError(_difference(call, said, ranks))
    columns = list(zip(*(frame[_DIGEST_BYTES:] for frame in frames), strict=True))
    for i, column in enumerate(columns):
        if _SPARSE[0] in column:
            where = [rank for rank, code in zip(ranks, column, strict=True) if code == _SPARSE[0]]
            raise PayloadError(
                f"{call} takes dense tensors, but tensor {i} of {len(lines)} ({lines[i]}) is "
                f"sparse on ranks {where}: use sparse=False, or make it dense with to_dense()"
            )
    table = {code[0]: layout for code, layout in _LAYOUTS}
    return Described(
        [any(code != _NONE[0] for code in column) for column in columns],
        [table.get(column[0]) if len(set(column)) == 1 else None for column in columns],
    )


def _difference(call: str, lists: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    longest = max(len(lines) for lines in lists)
    place = next(
        i for i in range(longest + 1) if len({tuple(lines[i : i + 1]) for lines in lists}) > 1
    )
    said = [
        f"rank {rank} has {lines[place] if place < len(lines) else 'nothing'} there "
        f"({len(lines)} in all)"
        for rank, lines in zip(ranks, lists, strict=True)
    ]
    return (
        f"{call}: the lists differ between ranks from tensor {place} on: {'; '.join(said)}: give "
        "every rank the same tensors in the same order"
    )
