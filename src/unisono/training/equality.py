"""Whether all ranks have the same values: which leaf differs, and on which ranks."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from unisono.collectives.call import guarded, ranks_of, swap
from unisono.collectives.membership import GroupLike, team
from unisono.context import ContextState
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.payload.codec import decode, encode, failure, is_dense, raise_failures, reason
from unisono.payload.codec import plain as plain_tensor
from unisono.payload.memory import view_bytes
from unisono.payload.pytree import survey
from unisono.topology import Group
from unisono.training.agreement import is_sharded
from unisono.training.states import has_state, module_states, plain

__all__ = ("assert_equal",)

_DIGEST_BYTES = 16
_NAMED = 5
_CALL = "assert_equal"
Leaf = tuple[str, bytes]  # what it looks like, and the digest of its value


@guarded
def assert_equal(tree: Any, group: GroupLike = None) -> None:
    """Check that all ranks have the same values, bit for bit; else say which differ, and where.

    Collective over `group`. Ranks exchange one digest, and more only if values differ; a tensor on
    an accelerator is copied to the host for its digest.

    Args:
        tree: a tensor, number, text or other object, a module, an optimizer or what else has a
            state dict, and dicts, lists, tuples and dataclasses of these. Tensors are the same if
            dtype, shape and bits are, wherever they lie; sets if their items are; other objects if
            their pickles are. Of a DTensor only dtype and shape are compared.
        group: a Group, a list of ranks, or None for all ranks.

    Raises:
        CollectiveMismatchError: values differ; names them by path, with the ranks that have each
            (on every rank).
        PayloadError: a value can't be pickled, or a container contains itself (on every rank).
        CollectiveError: a peer failed or didn't come in time.

    Example:
        >>> import torch, unisono as idist
        >>> idist.assert_equal({"model": torch.nn.Linear(2, 1), "epoch": 3})
    """
    context, group, is_member = team(group)
    if not is_member:
        return
    leaves: dict[str, Leaf] = {}
    try:
        leaves = _leaves(tree)
        frame = encode(_digest(encode(sorted(leaves.items()))))
    except Exception as error:  # what the classes of the user raise
        frame = failure(reason(error))
    with context.calls.call(_CALL, group):
        frames = swap(context, _CALL, frame, group)
        raise_failures(frames, lambda: ranks_of(context, group), _CALL)
        if len({bytes(each) for each in frames}) > 1:
            _refuse(context, leaves, group)


def _leaves(tree: Any) -> dict[str, Leaf]:
    """Describe what a tree holds, by path. Local, but for modules' state dicts."""
    try:
        tree = _opened(tree)
    except RecursionError as error:
        raise PayloadError("a container contains itself, or is nested too deep") from error
    values, paths, empty = survey(plain(tree, module_states(tree)))
    leaves = {path: _leaf(value) for path, value in zip(paths, values, strict=True)}
    return {**leaves, **dict.fromkeys(empty, ("", b""))}


def _opened(node: Any) -> Any:
    """Put dicts of all their fields in the place of dataclasses without a state. Local."""
    if has_state(node):
        return node
    if is_dataclass(node) and not isinstance(node, type):
        names = [item.name for item in fields(node) if hasattr(node, item.name)]
        return {f".{name}": _opened(getattr(node, name)) for name in names}
    if isinstance(node, dict):
        made = {key: _opened(item) for key, item in node.items()}
        return made if any(made[key] is not node[key] for key in node) else node
    if not isinstance(node, (list, tuple)):
        return node
    items = [_opened(item) for item in node]
    if all(new is old for new, old in zip(items, node, strict=True)):
        return node
    make: Any = getattr(node, "_make", list if isinstance(node, list) else tuple)
    return make(items)


def _leaf(value: Any) -> Leaf:
    if isinstance(value, Tensor) and (is_dense(value) or is_sharded(value)):
        look = f"{str(value.dtype)[6:]}{list(value.shape)}"
        if is_sharded(value):
            return look, b""
        data = plain_tensor(value.detach()).cpu().resolve_conj().resolve_neg().contiguous()
        return look, _digest(view_bytes(data))
    ordered = _in_order(value)
    if ordered is not value:
        return f"{ordered[0]}({reprlib.repr(ordered[1])})", _digest(encode(ordered))
    shown = type(value).__qualname__ if isinstance(value, Tensor) else reprlib.repr(value)
    return shown, _digest(encode([value] if type(value) is int else value))


def _in_order(value: Any) -> Any:
    """Put the items of a set, whose order may be another on each rank, into one order. Local."""
    if type(value) not in (set, frozenset):
        return value
    items = [_in_order(item) for item in value]
    return type(value).__name__, sorted(items, key=lambda item: encode([item]))


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _refuse(context: ContextState, leaves: dict[str, Leaf], group: Group | None) -> None:
    """Raise what differs. Collective over `group`."""
    blobs = swap(context, f"{_CALL}: values differ", encode(leaves), group)
    by_rank: list[dict[str, Leaf]] = [decode(blob, context.model.device) for blob in blobs]
    ranks = ranks_of(context, group)
    paths = list(dict.fromkeys(path for each in by_rank for path in each))
    differing = [path for path in paths if len({each.get(path) for each in by_rank}) > 1]
    lines = [_line(path, [each.get(path) for each in by_rank], ranks) for path in differing]
    more = f"; and {len(lines) - _NAMED} others differ" if len(lines) > _NAMED else ""
    raise CollectiveMismatchError(
        f"{_CALL}: {len(differing)} of {len(paths)} values differ between ranks: "
        f"{'; '.join(lines[:_NAMED])}{more}"
    )


def _line(path: str, column: Sequence[Leaf | None], ranks: Sequence[int]) -> str:
    """Say which ranks have what at a path. Local."""
    shown = []
    is_seen = len({each and each[0] for each in column}) > 1
    for leaf in dict.fromkeys(column):
        where = [rank for rank, each in zip(ranks, column, strict=True) if each == leaf]
        what, digest = ("nothing", b"") if leaf is None else leaf
        shown.append(
            f"ranks {where}: {what}{'' if is_seen else f' with digest {digest.hex()[:8]}'}"
        )
    return f"{path or 'the value'} ({' | '.join(shown)})"
