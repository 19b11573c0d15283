"""One deadline for a block has one meaning on every model that watches its waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from unisono.deadlines import limit_of
from unisono.errors import ArgumentError, CollectiveTimeoutError

CALLS: dict[str, Callable[[], Any]] = {
    "barrier": unisono.barrier,
    "a large all_reduce": lambda: unisono.all_reduce(torch.ones(300_000)),
    "recv": lambda: unisono.recv(src=1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_collective_is_over_at_the_deadline_of_its_block(
    backend: str, call: str, tmp_path: Path
) -> None:
    def fn(local_rank: int) -> float:
        unisono.barrier()
        if local_rank == 1:
            while not (tmp_path / "over").exists():
                time.sleep(0.01)
            return 0.0
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError), unisono.deadline(0.5):
            CALLS[call]()
        (tmp_path / "over").touch()
        return time.monotonic() - start

    found = unisono.spawn(backend, fn, nproc_per_node=2, timeout=20)
    assert 0.4 < found[0] < 10


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_rank_that_comes_after_the_deadline_of_another_is_told_so(
    backend: str, tmp_path: Path
) -> None:
    def fn(local_rank: int) -> int:
        unisono.barrier()
        if local_rank == 0:
            with pytest.raises(CollectiveTimeoutError), unisono.deadline(0.5):
                unisono.barrier()
            (tmp_path / "over").touch()
        while not (tmp_path / "over").exists():
            time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(CollectiveTimeoutError):
                unisono.barrier()
        (tmp_path / f"told{local_rank}").touch()
        while not (tmp_path / f"told{1 - local_rank}").exists():
            time.sleep(0.01)
        return local_rank

    assert unisono.spawn(backend, fn, nproc_per_node=2, timeout=20) == [0, 1]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_what_is_done_in_time_is_done(backend: str) -> None:
    def fn(local_rank: int) -> Any:
        with unisono.deadline(timedelta(seconds=30)):
            return unisono.all_gather(local_rank)

    assert unisono.spawn(backend, fn, nproc_per_node=2) == [[0, 1]] * 2


def test_the_soonest_of_nested_deadlines_holds_and_they_end() -> None:
    assert limit_of(5.0) == 5.0
    assert limit_of(None) is None
    with unisono.deadline(2):
        assert limit_of(1.0) == 1.0
        with unisono.deadline(100):
            assert 1 < (limit_of(None) or 0) <= 2
    assert limit_of(None) is None


@pytest.mark.parametrize("value", [0, -1, "x", None, True, float("nan")])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError), unisono.deadline(value):
        pass
