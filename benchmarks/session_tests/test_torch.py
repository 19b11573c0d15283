"""The tests with torch's ``MultiProcContinuousTest``: processes that stay for a class."""

from __future__ import annotations

import torch
import torch.distributed as dist
from how_many import VALUES
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize


class TestSum(MultiProcContinuousTest):
    """The tests themselves."""

    world_size = 2

    @classmethod
    def backend_str(cls) -> str:
        """Give the backend of its ranks."""
        return "gloo"

    @parametrize("value", VALUES)
    def test_sum(self, value: int) -> None:
        """Sum a tensor over two ranks."""
        total = torch.tensor([value + self.rank])
        dist.all_reduce(total)
        assert total.item() == 2 * value + 1


instantiate_parametrized_tests(TestSum)
