"""One deadline for a block has one meaning on every model that watches its waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from tests.support.clock import fast_clock
from tests.support.processes import until
from unisono import deadlines
from unisono.deadlines import Limit, limit_of
from unisono.errors import ArgumentError, CollectiveError, CollectiveTimeoutError

LIMIT_S = 60.0
BIG = 2_000_000  # elements: more than what travels in a round


def start_and_wait() -> None:
    with unisono.deadline(30):
        handle = unisono.all_reduce(torch.ones(BIG), async_op=True)
    handle.wait()


def within(call: Callable[[], Any]) -> None:
    with unisono.deadline(30):
        call()


CALLS: dict[str, Callable[[], None]] = {
    "barrier": lambda: within(unisono.barrier),
    "a large all_reduce": lambda: within(lambda: unisono.all_reduce(torch.ones(BIG))),
    "what is started in it": start_and_wait,
    "a group that is made in it": lambda: within(lambda: unisono.barrier(group=[0, 1])),
    "recv": lambda: within(lambda: unisono.recv(src=1)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", ["threads", "gloo", "gloo, nothing compared"])
def test_a_collective_is_over_at_the_deadline_of_its_block(
    backend: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the rank that comes after it is told so."""
    if "nothing compared" in backend:  # so that ranks miss each other on the data plane alone
        monkeypatch.setenv("UNISONO_DEBUG", "0")
        monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")

    def fn(local_rank: int) -> None:
        unisono.barrier()
        if local_rank == 0:
            begin = time.monotonic()
            with fast_clock(), pytest.raises(CollectiveError) as caught:
                CALLS[call]()
            assert 0.5 <= time.monotonic() - begin < 30  # and not at the job's timeout, after 60
            if "group" not in call:  # which torch makes
                assert isinstance(caught.value, CollectiveTimeoutError)
                assert "rank 1" in str(caught.value)
            (tmp_path / "over").touch()
        until((tmp_path / "over").exists, LIMIT_S)
        if call == "barrier":
            for _ in range(2):
                with pytest.raises(CollectiveTimeoutError):
                    unisono.barrier()
        (tmp_path / f"told{local_rank}").touch()
        until((tmp_path / f"told{1 - local_rank}").exists, LIMIT_S)

    unisono.spawn(backend.partition(",")[0], fn, nproc_per_node=2, timeout=3600)


def test_the_soonest_of_nested_deadlines_holds_and_they_end() -> None:
    assert limit_of(5.0) == 5.0
    assert limit_of(None) is None
    with unisono.deadline(timedelta(seconds=2)):
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


def test_a_limit_of_another_boot_counts_by_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines may have one name; their monotonic clocks begin when each starts."""
    with unisono.deadline(30):
        sent = Limit.here()
    assert sent is not None
    with deadlines.within(sent):
        assert deadlines.end_of_block() == sent.until
    monkeypatch.setattr(deadlines, "boot_id", lambda: "another")
    with deadlines.within(replace(sent, until=sent.until - 5000)):
        assert 0 < (limit_of(None) or 0) <= 30


@pytest.mark.parametrize("value", [0, -1, "x", None, True, float("nan")])
def test_what_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError), unisono.deadline(value):
        pass
