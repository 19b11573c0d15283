"""Exact sums have one hash on any number of ranks, and plain ones in every job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import unisono as idist
from tests.support.random_sums import SIZES, digest, digest_wanted, plain_digest
from tests.support.short_rounds import launch_with_short_rounds

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_ten_thousand_sums_have_one_hash_on_any_number_of_ranks(backend: str) -> None:
    def digests(rank: int) -> list[set[str]]:
        return [digest(rank, dtype) for dtype in DTYPES]

    found = {size: idist.spawn(backend, digests, nproc_per_node=size) for size in SIZES}
    due = [{digest_wanted(dtype)} for dtype in DTYPES]
    assert found == {size: [due] * size for size in SIZES}


@pytest.mark.parametrize("is_shared", [True, False], ids=["memory", "ring"])
def test_a_second_job_gives_plain_sums_the_same_bits(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch: Callable[..., list[str]] = idist.spawn
    if not is_shared:
        monkeypatch.setenv("UNISONO_SHARED_BYTES", "0")
        launch = launch_with_short_rounds
    first, second = (
        launch("gloo", plain_digest, (torch.float32,), nproc_per_node=3) for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 1
