"""A collective with `async_op=True` is held to what one without it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono
from unisono.errors import CollectiveMismatchError
from unisono.testing.pytest_plugin.body import World

# The function and its value, for the line that counts is the innermost one of the user.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[float], Any]]] = {
    "number": (unisono.all_reduce, float),
    "small tensor": (unisono.all_reduce, lambda x: torch.full((3,), x)),
    "large tensor": (unisono.all_reduce, lambda x: torch.full((1 << 20,), x)),
    "in place": (unisono.all_reduce_, lambda x: torch.full((1 << 20,), x)),
    "dict": (unisono.all_reduce, lambda x: {"loss": x}),
    "all_gather": (unisono.all_gather, float),
    "broadcast": (unisono.broadcast, float),
}
HERE = os.path.basename(__file__)


def _one_too_many(local_rank: int, name: str) -> str:
    call, value = CALLS[name]
    with pytest.raises(CollectiveMismatchError) as caught:
        if local_rank == 0:
            call(value(100.0), async_op=True).wait()
        call(value(1.0), async_op=True).wait()
        call(value(10.0), async_op=True).wait()
    return str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "threads"])
@pytest.mark.parametrize("name", CALLS)
def test_one_call_too_many_is_noticed_by_the_lines_of_the_user(backend: str, name: str) -> None:
    """The thread that carries the calls has one line for all of them."""
    for message in unisono.spawn(backend, _one_too_many, args=(name,), nproc_per_node=2):
        assert "has made one call" in message
        assert message.count(f"{HERE}:") == 5, message


@pytest.mark.ranks(2)
def test_a_mismatch_tells_the_line_of_the_user(world: World) -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        if world.rank:
            unisono.all_reduce(2.0)
        else:
            unisono.all_gather({1}, async_op=True).wait()
    first, second = str(caught.value).splitlines()[1:3]
    assert "rank 0: all_gather at " in first
    assert HERE in first
    assert HERE in second
