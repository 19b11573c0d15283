"""Torch's own tensors without memory of their own, on gloo: refused by name, or carried whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.masked import masked_tensor

import unisono
from unisono.errors import PayloadError


def refuse_all(local_rank: int) -> int:
    mesh = init_device_mesh("cpu", (unisono.get_world_size(),))
    spread: Any = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    with FakeTensorMode():
        fake: Any = torch.ones(3)
    for value, words in ((spread, r"DTensor.*full_tensor\(\)"), (fake, "FakeTensor")):
        calls: tuple[Any, ...] = (unisono.all_reduce, unisono.all_gather, unisono.broadcast)
        for call in calls:
            with pytest.raises(PayloadError, match=words):
                call(value)
    return int(unisono.all_reduce(1))


def carry_masked(local_rank: int) -> tuple[str, list[float], list[bool]]:
    mask = torch.tensor([True, False, True])
    value: Any = masked_tensor(torch.arange(3.0) + local_rank, mask)
    with pytest.raises(PayloadError, match="MaskedTensor"):
        unisono.all_reduce(value)
    got = unisono.broadcast(value, src=1)
    return type(got).__name__, got.get_data().tolist(), got.get_mask().tolist()


def test_sharded_and_fake_tensors_are_refused_on_every_rank() -> None:
    assert unisono.spawn("gloo", refuse_all, nproc_per_node=2, timeout=60) == [2, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_masked_tensors_are_broadcast_as_they_are() -> None:
    parts = ("MaskedTensor", [1.0, 2.0, 3.0], [True, False, True])
    assert unisono.spawn("gloo", carry_masked, nproc_per_node=2, timeout=60) == [parts] * 2
