"""What is tested here: parts of a training program, as they stand in many repositories."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import unisono as idist


class EmptyShareError(ValueError):
    """This rank has nothing to work on."""


def share(samples: Sequence[int]) -> Sequence[int]:
    """Give this rank's samples: each rank has every n-th.

    Raises:
        EmptyShareError: there are fewer samples than ranks (on those that get none).
    """
    mine = samples[idist.get_rank() :: idist.get_world_size()]
    if not mine:
        raise EmptyShareError(f"{len(samples)} samples are too few for rank {idist.get_rank()}")
    return mine


class Mean:
    """The mean of values that each rank has some of."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, values: Tensor) -> None:
        """Take values in."""
        self.total += values.sum().item()
        self.count += values.numel()

    def compute(self) -> float:
        """Give the mean over all ranks. Collective over all ranks."""
        both = idist.all_reduce({"total": self.total, "count": self.count})
        return both["total"] / both["count"]


def gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Give the gradients of one step. Collective over all ranks where the model is wrapped."""
    nn.functional.mse_loss(model(inputs), targets).backward()
    return [weights.grad for weights in model.parameters() if weights.grad is not None]


def make_model() -> nn.Module:
    """Make a small model, the same each time."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(torch.randn(weights.shape, generator=generator))
    return model
