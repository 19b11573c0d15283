"""The tests with pytest-isolate-mpi: ``mpirun`` for each test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from how_many import VALUES


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("value", VALUES)
def test_sum(mpi_ranks: int, comm: Any, value: int) -> None:
    """Sum a tensor over two ranks."""
    from mpi4py import MPI

    total = torch.tensor([value + comm.rank])
    comm.Allreduce(MPI.IN_PLACE, total.numpy())
    assert total.item() == 2 * value + 1
