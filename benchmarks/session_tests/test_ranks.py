"""The tests with our plug-in."""

import pytest
import torch
from how_many import VALUES

import unisono as idist

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("value", VALUES)
def test_sum(value: int) -> None:
    """Sum a tensor over two ranks."""
    total = idist.all_reduce(torch.tensor([value + idist.get_rank()]))
    assert total.item() == 2 * value + 1
