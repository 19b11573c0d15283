"""Training with fixed shards and exact sums gives one checkpoint on any number of ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import unisono as idist

SHARDS = 4


def sum_exactly(grads: list[Tensor]) -> list[Tensor]:
    return idist.exact_sum(grads)


def sum_plainly(grads: list[Tensor]) -> list[Tensor]:
    return idist.all_reduce([each.sum(0) for each in grads])


def train(local_rank: int, folder: str, is_exact: bool) -> str:
    """Train on fixed shards, save, and give the hash of the file. Collective over all ranks."""
    torch.set_num_threads(1)
    rank, size = idist.get_rank(), idist.get_world_size()
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, 0.3, generator=generator)
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for step in range(15):
        mine = []
        for shard in range(rank, SHARDS, size):
            drawn = torch.Generator().manual_seed(100 * step + shard)
            x = torch.randn(8, 6, generator=drawn)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
            mine.append(torch.autograd.grad(loss, parameters))
        stacked = [
            torch.stack([grads[i] for grads in mine])
            if mine
            else parameter.new_empty((0, *parameter.shape))
            for i, parameter in enumerate(parameters)
        ]
        totals = sum_exactly(stacked) if is_exact else sum_plainly(stacked)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total / SHARDS
        optimizer.step()
    path = Path(folder, f"{rank}-of-{size}", "checkpoint.pt")
    path.parent.mkdir()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(("backend", "sizes"), [("threads", (2, 4, 5)), ("gloo", (3,))])
def test_a_checkpoint_has_the_same_bytes_on_any_number_of_ranks(
    backend: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """With 3 one rank has two shards, with 5 one has none; 4 on gloo are in the recipe."""
    alone = train(0, str(tmp_path), True)
    for size in sizes:
        found = idist.spawn(backend, train, (str(tmp_path), True), nproc_per_node=size)
        assert found == [alone] * size


def test_with_plain_sums_it_has_others(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    found = [
        idist.spawn("threads", train, (str(tmp_path), False), nproc_per_node=size)[0]
        for size in (1, 2, 4)
    ]
    assert len(set(found)) > 1
