"""Torch's own tensors without memory of their own, on gloo."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import unisono
from unisono.errors import PayloadError


@pytest.mark.ranks(2, on="gloo", timeout=60)
@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of torch 2.6
def test_a_tensor_that_is_spread_over_the_ranks_is_refused_on_every_rank() -> None:
    # Imported here, for only the ranks need them.
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
    tensors = importlib.import_module("torch.distributed.tensor")
    spread: Any = tensors.distribute_tensor(torch.arange(8.0), mesh, [tensors.Shard(0)])
    for call in (unisono.all_reduce, unisono.all_gather, unisono.broadcast):
        with pytest.raises(PayloadError, match=r"DTensor.*full_tensor\(\)"):
            call(spread)
    assert unisono.all_reduce(1) == 2
