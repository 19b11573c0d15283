"""Several workers end with the parameters of one process that sees the whole batch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono as idist
from tests.support.worlds import real, run

JOBS = [
    pytest.param("threads", 3, id="threads-3"),
    pytest.param("gloo", 2, id="gloo-2"),
    pytest.param("mpi4py", 2, id="mpi4py-2", marks=real),
    pytest.param("mpi4py", 3, id="mpi4py-3", marks=real),
    pytest.param("horovod", 2, id="horovod-2", marks=real),
    pytest.param("horovod", 3, id="horovod-3", marks=real),
]
EPOCHS = 2
RATE = 0.05
Case = tuple[str, bool, int]
# A case takes seconds on few cores: these have every kind once or twice, gloo has all.
FEW: list[Case] = [("images", False, 1), ("digits", True, 2), ("images", True, 1)]
FEW += [("digits", False, 2)]
CASES: list[Case] = list(itertools.product(("images", "digits"), (False, True), (1, 2)))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.body(x))


def resnet(channels: int, seed: int) -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10, bias=False),
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=generator)
    return net


def dataset(kind: str) -> TensorDataset:
    if kind == "digits":
        digits = load_digits()
        images = torch.tensor(digits.data[:301]).view(-1, 1, 8, 8) / 16
        return TensorDataset(images, torch.tensor(digits.target[:301]))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(37, 3, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(10, (37,), generator=generator))


def global_batch(kind: str, size: int) -> int:
    return size * (16 if kind == "digits" else 5)


def channels_of(data: TensorDataset) -> int:
    return int(data.tensors[0].shape[1])


def train(local_rank: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    """Train with the helpers; only rank 0 has the right parameters at the start."""
    return [train_one(*case) for case in cases]


def train_one(kind: str, sync_bn: bool, accumulate: int) -> dict[str, Tensor]:
    data = dataset(kind)
    plain = resnet(channels_of(data), seed=idist.get_rank())
    model = idist.auto_model(plain, sync_bn=sync_bn)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
    loader = idist.auto_dataloader(data, batch_size=global_batch(kind, idist.get_world_size()))
    step = 0
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            step += 1
            if step % accumulate:
                with idist.no_sync(model):
                    backward(model, images, labels, accumulate)
                continue
            backward(model, images, labels, accumulate)
            optimizer.step()
            optimizer.zero_grad()
    return {
        name: item.detach().clone() for name, item in idist.unwrap_model(model).state_dict().items()
    }


def backward(model: nn.Module, images: Tensor, labels: Tensor, accumulate: int) -> None:
    loss: Any = functional.cross_entropy(model(images), labels) / accumulate
    loss.backward()


def reference(kind: str, sync_bn: bool, accumulate: int, size: int) -> dict[str, Tensor]:
    """Train in one process on the whole batch; without sync_bn normalised part by part."""
    data = dataset(kind)
    model = resnet(channels_of(data), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    samplers: list[Any] = [DistributedSampler(data, size, rank) for rank in range(size)]
    step = 0
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        share = global_batch(kind, size) // size
        loaders = [DataLoader(data, share, sampler=sampler) for sampler in samplers]
        for parts in zip(*loaders, strict=True):
            step += 1
            batches = [torch.cat(column) for column in zip(*parts, strict=True)]
            if sync_bn:
                backward(model, batches[0], batches[1], accumulate)
            else:
                for images, labels in parts:
                    backward(model, images, labels, accumulate * size)
            if step % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("backend", "size"), JOBS)
def test_workers_train_as_one_process_does(backend: str, size: int) -> None:
    cases = CASES if backend == "gloo" else FEW
    states = run(backend, size, train, cases, timeout=300)
    for i, case in enumerate(cases):
        expected = reference(*case, size)
        start = resnet(channels_of(dataset(case[0])), seed=0).state_dict()
        for state in (by_rank[i] for by_rank in states):
            check_states(state, expected, start, has_all_buffers=case[1])


def check_states(
    state: dict[str, Tensor], expected: dict[str, Tensor], start: Any, has_all_buffers: bool
) -> None:
    assert list(state) == list(expected)
    for name, item in expected.items():
        if ("running" in name or "num_batches" in name) and not has_all_buffers:
            continue  # without sync_bn they are those of a part of the batch
        torch.testing.assert_close(state[name], item, rtol=1e-5, atol=1e-9)
    assert any(not torch.equal(start[name], item) for name, item in expected.items())
