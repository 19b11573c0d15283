"""Training on XLA: its step averages the gradients; needs an environment of torch_xla's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as idist
from tests.support.requirements import require

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _installed() -> None:
    is_here = importlib.util.find_spec("torch_xla") is not None
    require("xla", None if is_here else "torch_xla isn't installed")


def network() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            values = torch.arange(parameter.numel()).float().view(parameter.shape)
            parameter.copy_(torch.sin(values + i))
    return net


def data() -> Tensor:
    return torch.cos(torch.arange(48).float()).view(12, 4)


def train(local_rank: int) -> list[Tensor]:
    rank = idist.get_rank()
    net = network()
    if rank:  # only rank 0 has the right ones
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rows: Any = list(data())
    loader = idist.auto_dataloader(rows, batch_size=4, shuffle=False)
    for _ in range(2):
        for batch in loader:
            assert batch.device == idist.device()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def reference() -> list[Tensor]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in torch.split(data(), 4):
            net(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def test_two_replicas_train_as_one_process_does() -> None:
    for trained in idist.spawn("xla-cpu", train, nproc_per_node=2):
        for mine, expected in zip(trained, reference(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def saves_and_loads(local_rank: int, path: str) -> list[Tensor]:
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model(data().to(idist.device())).pow(2).mean().backward()
    optimizer.step()
    idist.save_checkpoint({"model": model, "optimizer": optimizer}, path)
    again = idist.auto_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    other = idist.auto_optim(torch.optim.SGD(again.parameters(), lr=0.5, momentum=0.9))
    idist.load_checkpoint(path, into={"model": again, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1
    alone = idist.load_checkpoint(path)["model"]
    assert {item.device for item in alone.values()} == {idist.device()}
    return [item.detach().cpu() for item in again.parameters()]


def test_what_two_replicas_save_loads_there_and_without_xla(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    loaded = idist.spawn("xla-cpu", saves_and_loads, args=(str(path),), nproc_per_node=2)
    net, optimizer = network(), torch.optim.SGD(network().parameters(), lr=0.5, momentum=0.9)
    idist.load_checkpoint(path, into={"model": net, "optimizer": optimizer})
    for trained in loaded:
        for mine, expected in zip(trained, net.parameters(), strict=True):
            assert torch.equal(mine, expected)
    assert all(item["momentum_buffer"].any() for item in optimizer.state.values())
