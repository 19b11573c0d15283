"""Reductions between hosts: what a model gives back is what every rank gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.host.test_arena import Watching
from unisono.host.hierarchical import TwoLevels
from unisono.model.reduction import ReduceOp
from unisono.topology import Group


class Between(Watching):
    """Two hosts of one rank each, whose ranks have the same values."""

    dtypes = frozenset({torch.float32})

    def __init__(self, in_place: bool) -> None:
        super().__init__(lambda position: None)
        self.model: Any = self
        self.in_place = in_place

    def make_part(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, group: Group) -> Tensor:
        assert group.ranks == (0, 1)
        return tensor.mul_(2) if self.in_place else 2 * tensor


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_may_reduce_in_place_or_not(in_place: bool) -> None:
    levels = TwoLevels(None, [[0], [1]], 0, Between(in_place))
    tensor = torch.tensor([1.0, 3.0])
    assert levels.all_reduce(tensor, ReduceOp.SUM) is tensor
    assert tensor.tolist() == [2.0, 6.0]
