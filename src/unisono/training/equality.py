"""Comparison of values across ranks, with the paths and ranks of differences."""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from unisono.collectives.call import exchange_blobs, guarded
from unisono.collectives.membership import GroupLike, context_and_group
from unisono.context import ContextState
from unisono.errors import CollectiveMismatchError, PayloadError
from unisono.payload.codec import decode, encode, frame_or_reason, raise_failures
from unisono.payload.pickling import dump
from unisono.payload.pytree import mapped, survey
from unisono.payload.tensors import is_dense, plain as plain_tensor, view_bytes
from unisono.topology import Group, ranks_by_value
from unisono.training.same_tensors import is_sharded
from unisono.training.states import has_state, own_states, plain

_DIGEST_BYTES = 16
_NAMED = 5
_CALL = "assert_equal"
Leaf = tuple[str, bytes]  # short text, and digest of the value
_NOTHING: Leaf = ("nothing", b"")


@guarded
def assert_equal(tree: Any, group: GroupLike = None) -> None:
    """Check that all ranks have the same values, bit for bit; report differences by path.

    Collective over `group`. Ranks exchange one digest, and more only if values differ; a tensor on
    an accelerator is copied to the host for its digest.

    Args:
        tree: a tensor, number, string or other object, a module, an optimizer or another object
            with a state dict, and dicts, lists, tuples and dataclasses of these. Tensors are equal
            if dtype, shape and bits are equal, on any device; sets, if their items are equal; other
            objects, if their pickles are equal. Of a DTensor only dtype and shape are compared.
        group: a Group, a list of ranks, or None for all ranks.

    Raises:
        CollectiveMismatchError: values differ; the message shows their paths, and the ranks that
            have each value (on every rank).
        PayloadError: a value can't be pickled, or a container contains itself (on every rank).
        CollectiveError: a peer failed or timed out.

    Example:
        >>> import torch, unisono as idist
        >>> idist.assert_equal({"model": torch.nn.Linear(2, 1), "epoch": 3})
    """
    context, group, is_member = context_and_group(group)
    if not is_member:
        return
    trees: dict[str, Any] = {}  # filled by `described`, and read by `differing`

    def described() -> bytes:
        try:
            opened = _with_fields_as_dicts(tree)
        except RecursionError as error:
            text = "a container contains itself, or is nested too deep"
            raise PayloadError(text) from error
        trees[""] = plain(opened, own_states(opened))  # with states in place of stateful objects
        return encode(digest(trees[""]))

    frame = frame_or_reason(described)
    with context.calls.begin(_CALL, group):
        frames = exchange_blobs(context, _CALL, frame, group)
        raise_failures(frames, lambda: context.model.topology.members(group), _CALL)
        found = differing(context, _CALL, trees, [{"": bytes(each)} for each in frames], group)
        if found:
            raise CollectiveMismatchError(f"{_CALL}: {found}")


def digest(tree: Any) -> bytes:
    """Compute a digest of a tree of plain values, for `differing`."""
    try:
        return _hash(*dump(tree))
    except PayloadError:  # a DTensor has no pickle
        leaves = _leaves(tree)
        return _hash(encode([(path, leaves[path][1]) for path in sorted(leaves)]))


def differing(
    context: ContextState,
    call: str,
    trees: Mapping[str, Any],
    digests: Sequence[Mapping[str, bytes]],
    group: Group | None = None,
) -> str:
    """Return a text about the values that differ between ranks; empty if none."""
    # Collective over `group` if digests differ.
    names = [
        name
        for name in dict.fromkeys(name for each in digests for name in each)
        if len({each[name] for each in digests if name in each}) > 1
    ]
    if not names:
        return ""
    frame = frame_or_reason(
        lambda: encode({name: _leaves(trees[name]) for name in names if name in trees})
    )
    frames = exchange_blobs(context, f"{call}: values differ", frame, group)
    ranks = context.model.topology.members(group)
    raise_failures(frames, lambda: ranks, call)
    by_rank = [decode(each, context.model.device) for each in frames]
    lines, count = [], 0
    for name in names:
        there = {
            rank: each[name] for rank, each in zip(ranks, by_rank, strict=True) if name in each
        }
        paths = dict.fromkeys(path for leaves in there.values() for path in leaves)
        count += len(paths)
        for path in paths:
            column = {rank: leaves.get(path, _NOTHING) for rank, leaves in there.items()}
            if len({hashed for _, hashed in column.values()}) > 1:
                lines.append(_line(name + path, column))
    more = f"; and {len(lines) - _NAMED} others differ" if len(lines) > _NAMED else ""
    # There may be no line: digests differ even if only the order of dict keys does.
    text = f"{len(lines)} of {count} values differ between ranks: "
    return f"{text}{'; '.join(lines[:_NAMED])}{more}" if lines else ""


def _leaves(tree: Any) -> dict[str, Leaf]:
    """Return text and digest of each leaf of a tree of plain values, by path."""
    values, paths, empty = survey(tree)
    leaves = {path: _leaf(value) for path, value in zip(paths, values, strict=True)}
    # Paths of empty containers, so that [] differs from a missing value.
    return {**leaves, **dict.fromkeys(empty, ("", b"empty"))}


def _with_fields_as_dicts(node: Any) -> Any:
    """Replace dataclasses without a state by dicts of their fields."""
    if has_state(node):
        return node
    if is_dataclass(node) and not isinstance(node, type):
        # A field with init=False may have no value yet.
        names = [item.name for item in fields(node) if hasattr(node, item.name)]
        return {f".{name}": _with_fields_as_dicts(getattr(node, name)) for name in names}
    return mapped(node, _with_fields_as_dicts) if isinstance(node, (dict, list, tuple)) else node


def _leaf(value: Any) -> Leaf:
    """Return a short text about a value, and its digest."""
    if isinstance(value, Tensor) and (is_dense(value) or is_sharded(value)):
        shown = f"{str(value.dtype)[6:]}{list(value.shape)}"
        if is_sharded(value):
            return shown, _hash(shown.encode())
        data = plain_tensor(value.detach()).cpu().resolve_conj().resolve_neg().contiguous()
        return shown, _hash(shown.encode(), view_bytes(data))
    ordered = _in_order(value)
    shown = type(value).__qualname__ if isinstance(value, Tensor) else reprlib.repr(value)
    if ordered is not value:
        shown = f"{ordered[0]}({reprlib.repr(ordered[1])})"
    return shown, _hash(*dump(ordered))


def _in_order(value: Any) -> Any:
    """Sort the items of a set, whose order may differ between ranks."""
    if type(value) not in (set, frozenset):
        return value
    items = [_in_order(item) for item in value]
    # Sorted by their pickles, since items of different types have no order.
    return type(value).__name__, sorted(items, key=lambda item: b"".join(dump(item)))


def _hash(*data: Any) -> bytes:
    made = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for each in data:
        made.update(each)
    return made.digest()


def _line(path: str, column: Mapping[int, Leaf]) -> str:
    """Return a text with each rank's value at a path."""
    ranks_of = ranks_by_value({rank: hashed for rank, (_, hashed) in column.items()})
    text_of = {hashed: column[ranks[0]][0] for hashed, ranks in ranks_of.items()}
    # Different values, such as two long tensors, may have the same text; then digests are shown.
    texts_differ = len(set(text_of.values())) > 1
    shown = []
    for hashed, ranks in ranks_of.items():
        digest_text = "" if texts_differ else f" with digest {hashed.hex()[:8]}"
        shown.append(f"ranks {ranks}: {text_of[hashed]}{digest_text}")
    return f"{path or 'the value'} ({' | '.join(shown)})"
