"""Fixtures of the tests: where a test runs in ranks, each rank makes its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def uneven(world: Any) -> Tensor:
    """Values of this rank: one on rank 0, two on rank 1, and so on."""
    return torch.arange(world.rank + 1, dtype=torch.float64) + 10 * world.rank


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Inputs [8, 4] and targets [8, 1], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True)
