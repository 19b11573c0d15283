"""Several workers end with the parameters of one process: nearly, or bitwise with exact sums."""

from __future__ import annotations

import hashlib
import itertools
import math
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono as idist
from tests.support.worlds import REAL, SERIAL, real, run

JOBS = [
    SERIAL,
    pytest.param("threads", 3, id="threads-3"),
    pytest.param("gloo", 2, id="gloo-2"),
    *REAL,
    *(pytest.param(name, 3, id=f"{name}-3", marks=real) for name in ("mpi4py", "horovod")),
]
EPOCHS, INFINITE = 2, 4
RATE = 0.05
SHARDS = 4  # shards of each step, for exact sums
SHARE = 5  # samples of a batch on each rank
CASES = list(itertools.product((False, True), (1, 2)))
"""Whether batch norms are synchronised, and how many batches a step takes."""


def network(seed: int) -> nn.Module:
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        nn.ReLU(),
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


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(37, 3, 6, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(10, (37,), generator=generator))


def train(local_rank: int) -> list[dict[str, Tensor]]:
    return [train_one(*case) for case in CASES]


def train_one(sync_bn: bool, accumulate: int, **options: Any) -> dict[str, Tensor]:
    """Train with the helpers; only rank 0 has the right parameters at the start."""
    model = idist.auto_model(network(seed=idist.get_rank()), sync_bn=sync_bn)
    optimizer = idist.auto_optim(optimizer_of(model), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loader = idist.auto_dataloader(dataset(), batch_size=SHARE * idist.get_world_size())
    step = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            for images, labels in loader:
                step += 1
                with idist.no_sync(model) if step % accumulate else nullcontext():
                    backward(scaler, model(images), labels, accumulate, step)
                if step % accumulate == 0:
                    limit = limit_at(step)
                    norm = idist.clip_grad_norm_(model, limit, optimizer=optimizer, scaler=scaler)
                    update(scaler, optimizer)
                    idist.assert_equal([norm, scaler.get_scale()])
    idist.assert_equal([list(model.parameters()), optimizer])
    state = idist.unwrap_model(model).state_dict()
    return {name: item.detach().clone() for name, item in state.items()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def backward(scaler: Any, scores: Tensor, labels: Tensor, parts: int, step: int) -> None:
    loss = functional.cross_entropy(scores, labels) / parts
    scaler.scale(loss * (math.inf if step == INFINITE else 10)).backward()


def limit_at(step: int) -> float:
    return math.inf if step % 3 == 0 else 1.0


def update(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def reference(sync_bn: bool, accumulate: int, size: int) -> dict[str, Tensor]:
    """Train in one process on whole batches; without sync_bn, normalise each rank's part."""
    data, model = dataset(), network(seed=0)
    optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    samplers: list[Any] = [DistributedSampler(data, size, rank) for rank in range(size)]
    step = 0
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(data, SHARE, sampler=sampler) for sampler in samplers]
        for parts in zip(*loaders, strict=True):
            step += 1
            if sync_bn:
                images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
                backward(scaler, model(images), labels, accumulate, step)
            else:
                for images, labels in parts:
                    backward(scaler, model(images), labels, accumulate * size, step)
            if step % accumulate == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), limit_at(step))
                update(scaler, optimizer)
    assert scaler.get_scale() == 512.0  # the step with infinite gradients was skipped
    return model.state_dict()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("backend", "size"), JOBS)
def test_workers_train_as_one_process_does(backend: str, size: int) -> None:
    states = run(backend, size, train, timeout=300)
    start = network(seed=0).state_dict()
    for i, (sync_bn, accumulate) in enumerate(CASES):
        expected = reference(sync_bn, accumulate, size)
        assert any(not torch.equal(start[name], item) for name, item in expected.items())
        for state in (by_rank[i] for by_rank in states):
            check_state(state, expected, has_all_buffers=sync_bn)


def check_state(
    state: dict[str, Tensor], expected: dict[str, Tensor], has_all_buffers: bool
) -> None:
    assert list(state) == list(expected)
    for name, item in expected.items():
        # Without sync_bn, buffers depend on the rank's part of the batch.
        if has_all_buffers or not ("running" in name or "num_batches" in name):
            torch.testing.assert_close(state[name], item, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("backend", "size"), REAL[1:])
def test_horovod_s_optimizer_averages_before_it_is_clipped(backend: str, size: int) -> None:
    run(backend, size, with_options)


def with_options(local_rank: int) -> None:
    state = train_one(False, 2, backward_passes_per_step=2)
    check_state(state, reference(False, 2, 2), has_all_buffers=False)
    model = idist.auto_model(nn.Linear(1, 1, bias=False))
    optimizer = idist.auto_optim(
        torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Horovod warns of the step that was left out
        for is_clipped in (True, False):
            optimizer.zero_grad()
            model(torch.ones(1, 1) * idist.get_rank()).sum().backward()
            if is_clipped:
                idist.clip_grad_norm_(model, 1.0)
        optimizer.step()  # the second gradients weren't averaged by clipping
    idist.assert_equal(model)


def train_exactly(local_rank: int, folder: str) -> str:
    """Train on fixed shards, save, and return the hash of the file. Collective over all ranks."""
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
        rows = [parameter.new_empty((0, *parameter.shape)) for parameter in parameters]
        for shard in range(rank, SHARDS, size):
            drawn = torch.Generator().manual_seed(100 * step + shard)
            x = torch.randn(8, 6, generator=drawn)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
            grads = torch.autograd.grad(loss, parameters)
            rows = [torch.cat([row, grad[None]]) for row, grad in zip(rows, grads, strict=True)]
        for parameter, total in zip(parameters, idist.exact_sum(rows), strict=True):
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
    """Of 3 ranks one has two shards, of 5 one has none; a recipe's test has 4 on gloo."""
    alone = train_exactly(0, str(tmp_path))
    for size in sizes:
        found = idist.spawn(backend, train_exactly, (str(tmp_path),), nproc_per_node=size)
        assert found == [alone] * size
