"""Flattening of containers into leaves, and the inverse."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from unisono.errors import PayloadError
from unisono.payload.codec import reason

Tree = Any
_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None)})  # known without inspection
_MOST_CACHED = 256  # keys of a dict


def _children(node: Tree) -> list[Tree] | None:
    """Return a container's children; None if `node` is a leaf."""
    if isinstance(node, dict):
        return [*node.values()]
    if isinstance(node, list) or (isinstance(node, tuple) and not _is_record(node)):
        return [*node]
    if is_dataclass(node) and not isinstance(node, type):
        # `replace` accepts no other fields.
        return [getattr(node, item.name) for item in fields(node) if item.init]
    return None


def _names(node: Tree) -> Sequence[str]:
    """Return the keys of a container's children, in brackets."""
    if isinstance(node, dict):
        keys = tuple(node)
        is_short = len(keys) <= _MOST_CACHED and {*map(type, keys)} == {str}
        return (_names_of_keys if is_short else _names_of_keys.__wrapped__)(keys)
    if isinstance(node, list):
        return [f"[{index}]" for index in range(len(node))]
    if isinstance(node, tuple):
        names = getattr(node, "_fields", range(len(node)))
        return [f"({name})" for name, _ in zip(names, node, strict=True)]
    return [f".{item.name}" for item in fields(node) if item.init]


@lru_cache(32)  # metrics have the same keys in every call
def _names_of_keys(keys: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(f"{{{key!r}}}" for key in keys)


def _is_record(node: Tree) -> bool:
    """Return whether a tuple is a record, such as a struct_time, whose sum makes no sense."""
    return hasattr(node, "n_sequence_fields") and type(node).__module__ != "torch.return_types"


def flatten(tree: Tree) -> tuple[list[Any], list[str]]:
    """Return the leaves of nested dicts, lists, tuples and dataclasses, and their paths."""
    leaves, paths, _ = survey(tree)
    return leaves, paths


def survey(tree: Tree) -> tuple[list[Any], list[str], list[str]]:
    """Return the leaves and their paths as `flatten` does, and the paths of empty containers."""
    leaves: list[Any] = []
    paths: list[str] = []
    empty: list[str] = []
    _visit(tree, "", leaves, paths, empty)
    return leaves, paths, empty


def _visit(node: Tree, path: str, leaves: list[Any], paths: list[str], empty: list[str]) -> None:
    """Append the leaves and paths of a node and of all nodes below it."""
    # Not a closure: a recursive one is a reference cycle, left to the garbage collector.
    children = _children(node)
    if children is None:
        leaves.append(node)
        paths.append(path)
        return
    if not children:
        kind = next((base for base in (dict, list, tuple) if isinstance(node, base)), type(node))
        empty.append(f"{path} empty {kind.__name__}")
    names = _names(node)
    if _LEAVES.issuperset(map(type, children)):
        leaves += children
        paths += [path + name for name in names] if path else names
        return
    for name, child in zip(names, children, strict=True):
        _visit(child, path + name, leaves, paths, empty)


def unflatten(tree: Tree, leaves: list[Any]) -> Tree:
    """Build a container with the structure of `tree` from other leaves."""
    return _build(tree, iter(leaves))


def _build(node: Tree, source: Iterator[Any]) -> Tree:
    children = _children(node)
    if children is None:
        return next(source)
    if _LEAVES.issuperset(map(type, children)):
        built = [*islice(source, len(children))]
    else:
        built = [_build(child, source) for child in children]
    try:
        return _rebuild(node, iter(built))
    except Exception as error:
        kind = type(node).__qualname__
        raise PayloadError(f"a {kind} can't be put together again: {reason(error)}") from error


def _rebuild(node: Tree, built: Iterator[Tree]) -> Tree:
    if isinstance(node, dict):
        content = dict(zip(node, built, strict=True))
        return content if type(node) is dict else like(node, content)
    if isinstance(node, (list, tuple)):
        return like(node, built)
    return replace(node, **{name[1:]: next(built) for name in _names(node)})  # without the dot


def like(node: Tree, content: Any) -> Tree:
    """Return a dict, list or tuple of the type of `node`, with other `content`."""
    if isinstance(node, tuple):
        make: Any = getattr(node, "_make", type(node))  # a namedtuple has `_make`
        return make(content)
    new: Any = copy(node)  # not node.copy(), which may return a plain dict
    if isinstance(node, dict):
        for key, item in content.items():  # not update(), which adds in a Counter
            new[key] = item
    else:
        new[:] = content
    return new


def mapped(node: Tree, change: Callable[[Any], Any]) -> Tree:
    """Return a dict, list or tuple with changed items; the same object if no item has changed."""
    if isinstance(node, dict):
        made = {key: change(item) for key, item in node.items()}
        return like(node, made) if any(made[key] is not node[key] for key in made) else node
    items = [change(item) for item in node]
    return node if all(map(operator.is_, items, node)) else like(node, items)
