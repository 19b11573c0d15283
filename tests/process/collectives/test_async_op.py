"""A collective with `async_op=True` is held to what one without it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono
from tests.support.processes import in_fork
from unisono.errors import CollectiveMismatchError, UnisonoError

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


def _one_too_many(local_rank: int, name: str) -> str:
    call, value = CALLS[name]
    try:
        if local_rank == 0:
            call(value(100.0), async_op=True).wait()
        call(value(1.0), async_op=True).wait()
        call(value(10.0), async_op=True).wait()
    except CollectiveMismatchError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("backend", ["gloo", "threads"])
@pytest.mark.parametrize("name", CALLS)
def test_one_call_too_many_is_noticed_by_the_lines_of_the_user(backend: str, name: str) -> None:
    """The thread that carries the calls has one line for all of them."""
    here = os.path.basename(__file__)
    for message in unisono.spawn(backend, _one_too_many, args=(name,), nproc_per_node=2):
        assert "has made one call" in message
        assert message.count(f"{here}:") == 5, message


def _different(local_rank: int) -> str:
    try:
        if local_rank:
            unisono.all_reduce(2.0)
        else:
            unisono.all_gather({1}, async_op=True).wait()
    except CollectiveMismatchError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.parametrize("backend", ["gloo", "threads"])
def test_a_mismatch_tells_the_line_of_the_user(backend: str) -> None:
    for message in unisono.spawn(backend, _different, nproc_per_node=2):
        first, second = message.splitlines()[1:3]
        assert "rank 0: all_gather at " in first
        assert os.path.basename(__file__) in first
        assert os.path.basename(__file__) in second


def _in_a_fork(local_rank: int, name: str) -> tuple[int, Any]:
    call, value = CALLS[name]
    # So that a thread of the background is there, which the fork hasn't.
    call(value(0.0), async_op=True).wait()

    def look() -> None:
        with pytest.raises(UnisonoError, match="fork of rank"):
            call(value(7.0), async_op=True)

    return in_fork(look), unisono.all_gather(local_rank)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("name", CALLS)
def test_a_fork_of_a_rank_is_refused(name: str) -> None:
    """Its value took the rank's place on the others."""
    assert unisono.spawn("gloo", _in_a_fork, args=(name,), nproc_per_node=2, timeout=20) == [
        (0, [0, 1]),
        (0, [0, 1]),
    ]
