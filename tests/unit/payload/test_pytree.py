"""Containers taken apart and put together again."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

from unisono.payload.pytree import flatten, mapped, unflatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    name: Any
    value: Any = 0


@dataclass(slots=True)
class Derived:
    base: Any
    double: Any = field(init=False)

    def __post_init__(self) -> None:
        self.double = self.base * 2


class Numbers(list[Any]):
    pass


class Counts(dict[str, Any]):
    pass


TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner).map(lambda both: Pair(*both))
        | st.tuples(inner, inner).map(lambda both: Frozen(*both))
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_what_is_taken_apart_is_put_together_again(tree: Any) -> None:
    leaves, paths = flatten(tree)
    assert len(leaves) == len(paths)
    assert len(set(paths)) == len(paths)
    assert all(type(leaf) is int for leaf in leaves)
    before = repr(tree)
    assert repr(unflatten(tree, leaves)) == before
    doubled = unflatten(tree, [leaf * 2 for leaf in leaves])
    assert flatten(doubled) == ([leaf * 2 for leaf in leaves], paths)
    assert repr(tree) == before


def test_leaves_go_from_left_to_right_and_are_named() -> None:
    tree = {"b": [1, (2,)], "a": Pair(3, Frozen("x", {7: 4}))}
    leaves, paths = flatten(tree)
    assert leaves == [1, 2, 3, "x", 4]
    assert paths[:4] == ["{'b'}[0]", "{'b'}[1](0)", "{'a'}(left)", "{'a'}(right).name"]
    assert paths[4:] == ["{'a'}(right).value{7}"]
    assert flatten(5) == ([5], [""])


@pytest.mark.parametrize(
    "tree",
    [OrderedDict(b=1, a=2), defaultdict(int, a=1), Counter(a=1, b=2), Counts(a=1),
     Numbers([1, 2]), Pair(1, (2,)),
     Derived(3), [], (), {}, torch.Size([2, 3]), torch.ones(2, 2).max(0)],
    ids=lambda tree: type(tree).__name__,
)  # fmt: skip
def test_types_of_containers_are_kept(tree: Any) -> None:
    leaves, _ = flatten(tree)
    got = unflatten(tree, leaves)
    assert type(got) is type(tree)
    assert repr(got) == repr(tree)
    assert got is not tree or tree == ()


def test_items_of_a_counter_are_replaced_and_not_added() -> None:
    assert unflatten(Counter(a=1, b=2), [10, 20]) == Counter(a=10, b=20)
    assert mapped(Counter(a=1), lambda count: count + 1) == Counter(a=2)


def test_names_are_those_of_the_keys_whatever_is_equal_to_them() -> None:
    class Text(str):
        def __repr__(self) -> str:
            return "a text"

    for key, name in (("a", "{'a'}"), (Text("a"), "{a text}"), (1, "{1}"), (True, "{True}")):
        assert flatten({key: 0}) == ([0], [name])
        assert flatten({"x": {key: 0}}) == ([0], ["{'x'}" + name])


def test_computed_fields_are_computed_again() -> None:
    assert unflatten(Derived(3), [5]) == Derived(5)
    assert flatten(Derived(3)) == ([3], [".base"])
    copy = unflatten(defaultdict(lambda: 7, a=1), [2])
    assert (copy["a"], copy["new"]) == (2, 7)


def test_strings_sets_classes_and_times_are_leaves() -> None:
    for leaf in ("text", b"bytes", {1}, None, Frozen, Pair, torch.ones(2), range(3), time.gmtime()):
        assert len(flatten(leaf)[0]) == 1


def test_a_container_that_holds_itself_is_a_recursion_error() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(RecursionError):
        flatten(knot)
