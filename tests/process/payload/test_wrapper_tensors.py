"""Torch's own tensors without memory of their own, on gloo: refused by name, or carried whole."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import unisono
from unisono.errors import PayloadError
from unisono.testing.ranks.world import World

pytestmark = pytest.mark.ranks(2, on="gloo", timeout=60)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of torch 2.6
def test_sharded_and_fake_tensors_are_refused_on_every_rank() -> None:
    # Imported here, for only the ranks need them.
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (2,))
    tensors = importlib.import_module("torch.distributed.tensor")
    spread: Any = tensors.distribute_tensor(torch.arange(8.0), mesh, [tensors.Shard(0)])
    with importlib.import_module("torch._subclasses").FakeTensorMode():
        fake: Any = torch.ones(3)
    for value, words in ((spread, r"DTensor.*full_tensor\(\)"), (fake, "FakeTensor")):
        calls: tuple[Any, ...] = (unisono.all_reduce, unisono.all_gather, unisono.broadcast)
        for call in calls:
            with pytest.raises(PayloadError, match=words):
                call(value)
    assert unisono.all_reduce(1) == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors_are_broadcast_as_they_are(world: World) -> None:
    masked = importlib.import_module("torch.masked")
    value = masked.masked_tensor(torch.arange(3.0) + world.rank, torch.tensor([True, False, True]))
    with pytest.raises(PayloadError, match="MaskedTensor"):
        unisono.all_reduce(value)
    got: Any = unisono.broadcast(value, src=1)
    assert type(got).__name__ == "MaskedTensor"
    assert got.get_data().tolist() == [1.0, 2.0, 3.0]
    assert got.get_mask().tolist() == [True, False, True]
