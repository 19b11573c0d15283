"""The tests with mpi-pytest, which is as a rule called within ``mpiexec``."""

from __future__ import annotations

import pytest
import torch
from how_many import VALUES
from mpi4py import MPI


@pytest.mark.parallel(2)
@pytest.mark.parametrize("value", VALUES)
def test_sum(value: int) -> None:
    """Sum a tensor over two ranks."""
    total = torch.tensor([value + MPI.COMM_WORLD.rank])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total.numpy())
    assert total.item() == 2 * value + 1
