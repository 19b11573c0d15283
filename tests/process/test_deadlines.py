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
from tests.support.clock import fast_clock
from tests.support.processes import until
from unisono.deadlines import limit_of
from unisono.errors import ArgumentError, CollectiveTimeoutError

LIMIT_S = 60.0
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
    """And the rank that comes after it is told so."""

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 0:
            begin = time.monotonic()
            with fast_clock(), pytest.raises(CollectiveTimeoutError), unisono.deadline(30):
                CALLS[call]()
            assert 0.5 <= time.monotonic() - begin < 30  # and not at the job's timeout, after 60
            (tmp_path / "over").touch()
        until((tmp_path / "over").exists, LIMIT_S)
        if call == "barrier":
            for _ in range(2):
                with pytest.raises(CollectiveTimeoutError):
                    unisono.barrier()
        (tmp_path / f"told{local_rank}").touch()
        until((tmp_path / f"told{1 - local_rank}").exists, LIMIT_S)

    unisono.spawn(backend, fn, nproc_per_node=2, timeout=3600)


@pytest.mark.ranks(2, on="threads")
@pytest.mark.ranks(2, on="gloo")
def test_what_is_done_in_time_is_done() -> None:
    with unisono.deadline(timedelta(seconds=30)):
        assert unisono.all_gather(unisono.get_rank()) == [0, 1]


def test_the_soonest_of_nested_deadlines_holds_and_they_end() -> None:
    assert limit_of(5.0) == 5.0
    assert limit_of(None) is None
    with unisono.deadline(2):
        assert limit_of(1.0) == 1.0
        with unisono.deadline(100):
            assert 1 < (limit_of(None) or 0) <= 2
    assert limit_of(None) is None


def test_limits_pass_as_fast_as_their_clock() -> None:
    with fast_clock(1e-6), unisono.deadline(30):  # the host's time counts for nothing
        assert limit_of(None) == pytest.approx(30)
        assert limit_of(40) == pytest.approx(30)
    with fast_clock(1e9), unisono.deadline(30):
        assert limit_of(None) == 0


@pytest.mark.parametrize("value", [0, -1, "x", None, True, float("nan")])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError), unisono.deadline(value):
        pass
