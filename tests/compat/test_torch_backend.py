"""Libraries over torch.distributed on the backend "unisono", which they don't know."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.by_hand import Check, outcomes, prepare

OF_OTHERS = r".*"  # what these libraries warn of isn't ours
load: Any = importlib.import_module


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    prepare()


def line(rank: int) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(8, 1)
    return layer, torch.full((4, 8), float(rank + 1))


def expected_gradient(size: int) -> Tensor:
    return torch.full((1, 8), 4.0) * sum(range(1, size + 1)) / size


def accelerate(rank: int, size: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_WORLD_SIZE=str(size))
    accelerator = load("accelerate").Accelerator(cpu=True)
    layer, data = line(rank)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    items: Any = list(range(8))
    loader: Any = torch.utils.data.DataLoader(items, batch_size=2)
    module, optimizer, loader = accelerator.prepare(layer, optimizer, loader)
    accelerator.backward(module(data).sum())
    torch.testing.assert_close(
        accelerator.unwrap_model(module).weight.grad, expected_gradient(size)
    )
    optimizer.step()
    seen = [accelerator.gather_for_metrics(part) for part in loader]
    assert sorted(torch.cat(seen).tolist()) == list(range(8))
    assert accelerator.reduce(torch.ones(3), "mean").tolist() == [1.0] * 3
    assert accelerator.num_processes == size
    objects = load("accelerate.utils").gather_object([f"rank {rank}"])
    assert objects == [f"rank {other}" for other in range(size)]
    accelerator.wait_for_everyone()


def torchmetrics(rank: int, size: int, folder: Path) -> None:
    metrics = load("torchmetrics")
    mean, values = metrics.MeanMetric(), metrics.CatMetric()
    for score in [[1.0, 2.0, 3.0], [10.0]][rank]:  # uneven
        mean.update(score)
        values.update(torch.tensor([score]))
    assert float(mean.compute()) == 4.0
    assert sorted(values.compute().reshape(-1).tolist()) == [1.0, 2.0, 3.0, 10.0]


def ignite(rank: int, size: int, folder: Path) -> None:
    idist = load("ignite.distributed")
    assert (idist.backend(), idist.get_world_size()) == ("unisono", size)
    assert idist.all_reduce(rank + 1) == size * (size + 1) // 2
    assert idist.all_gather(f"rank {rank}") == [f"rank {other}" for other in range(size)]
    assert idist.broadcast(torch.tensor([rank]), src=1).item() == 1
    layer, data = line(rank)
    assert idist.auto_model(layer) is layer  # it wraps for backends that it knows: documented
    module = nn.parallel.DistributedDataParallel(layer)
    module(data).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected_gradient(size))
    loader = idist.auto_dataloader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=2)
    engine = load("ignite.engine").Engine(lambda _, items: float(items[0].sum()))
    load("ignite.metrics").Average().attach(engine, "mean")
    engine.run(loader, max_epochs=1)
    assert engine.state.metrics["mean"] == 28 / 8 * (2 / size)
    idist.barrier()


def mmengine(rank: int, size: int, folder: Path) -> None:
    ours = load("mmengine.dist")
    assert (ours.get_backend(), ours.get_dist_info()) == ("unisono", (rank, size))
    data = torch.full((3,), float(rank))
    ours.all_reduce(data, "mean")
    assert data.tolist() == [(size - 1) / 2] * 3
    assert ours.collect_results([rank], size, device="cpu") == (
        list(range(size)) if rank == 0 else None
    )
    objects = [{"rank": rank}]
    ours.broadcast_object_list(objects, src=1)
    assert objects == [{"rank": 1}]
    layer, inputs = line(rank)
    wrapped = load("mmengine.model").MMDistributedDataParallel(layer)
    wrapped.module(inputs).sum().backward()
    ours.all_reduce_params([layer.weight.grad], op="mean")
    torch.testing.assert_close(layer.weight.grad, expected_gradient(size))


CHECKS: list[Check] = [accelerate, torchmetrics, ignite, mmengine]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run what is installed in one job."""
    checks = [each for each in CHECKS if importlib.util.find_spec(each.__name__) is not None]
    return outcomes(checks, 2, tmp_path_factory.mktemp("job"), "unisono", OF_OTHERS)


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_libraries_run_on_it(job: dict[str, str], name: str) -> None:
    pytest.importorskip(name, reason=f"{name} isn't installed")
    failed = job[name]
    assert not failed, failed
