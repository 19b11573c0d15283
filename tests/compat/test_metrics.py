"""Metrics of other libraries are computed over all ranks, on models that these don't know."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import unisono as idist

SCORES = [[1.0, 2.0, 3.0], [10.0], [4.0, 4.0]]  # uneven, and their mean isn't that of means

JOBS = [("threads", 1), ("threads", 3), ("gloo", 2), ("kvstore", 2)]


@dataclass
class Measured:
    backend: str
    expected: list[float]
    """Of all ranks."""
    by_rank: list[dict[str, Any]]


@pytest.fixture(scope="module", params=JOBS, ids=[f"{backend}-{size}" for backend, size in JOBS])
def measured(request: pytest.FixtureRequest) -> Iterator[Measured]:
    """What the ranks of one job measured; what ignite knows of models is then what it was."""
    pytest.importorskip("torchmetrics", reason="torchmetrics isn't installed")
    pytest.importorskip("ignite", reason="pytorch-ignite isn't installed")
    backend, size = request.param
    utils = importlib.import_module("ignite.distributed.utils")
    with pytest.MonkeyPatch.context() as patched:
        for name in ("registered_computation_models", "_model", "_need_to_sync"):
            patched.setattr(utils, name, getattr(utils, name))
        expected = [score for row in SCORES[:size] for score in row]
        yield Measured(backend, expected, idist.spawn(backend, measure, nproc_per_node=size))


def measure(_local_rank: int) -> dict[str, Any]:
    return {"torchmetrics": by_torchmetrics(), "ignite": by_ignite(), "lone": lone_metrics()}


def test_metrics_of_torchmetrics(measured: Measured) -> None:
    for mean, values in (each["torchmetrics"] for each in measured.by_rank):
        assert mean == pytest.approx(sum(measured.expected) / len(measured.expected))
        assert values == measured.expected


def by_torchmetrics() -> tuple[float, list[float]]:
    import torch
    from torchmetrics import CatMetric, MeanMetric

    from unisono.compat import torchmetrics as ours

    mean, values = MeanMetric(**ours.OPTIONS), CatMetric(**ours.OPTIONS)
    for score in SCORES[idist.get_rank()]:
        mean.update(score)
        values.update(torch.tensor(score))
    return float(mean.compute()), values.compute().reshape(-1).tolist()


def test_a_metric_that_sees_no_other_rank_is_warned_of(measured: Measured) -> None:
    size = len(measured.by_rank)
    is_lone = size > 1 and measured.backend != "gloo"  # which torchmetrics knows
    wanted = [["parts.lone"] if is_lone and rank == 0 else [] for rank in range(size)]
    assert [each["lone"] for each in measured.by_rank] == wanted


def lone_metrics() -> list[str]:
    import torch
    from torchmetrics import MeanMetric

    from unisono.compat import torchmetrics as ours

    net = torch.nn.Linear(2, 1)
    net.parts = torch.nn.ModuleDict(
        {
            "lone": MeanMetric(),
            "ours": MeanMetric(**ours.OPTIONS),
            "meant": MeanMetric(sync_on_compute=False),
        }
    )
    if idist.model_name() != "threads":  # they have the filters of the test run, which are the same
        warnings.simplefilter("error", UserWarning)
    try:
        idist.auto_model(net, wrapper=lambda module: module)
    except UserWarning as error:
        assert "unisono.compat.torchmetrics.OPTIONS" in str(error)
        return str(error).partition(":")[0].split(", ")
    return []


def test_metrics_of_ignite(measured: Measured) -> None:
    size, mean = len(measured.by_rank), sum(measured.expected) / len(measured.expected)
    assert [each["ignite"] for each in measured.by_rank] == [(size, mean)] * size


def by_ignite() -> tuple[int, float]:
    import ignite.distributed
    from ignite.metrics import Average

    from unisono.compat import ignite_metrics

    ignite_metrics.install()
    ignite_metrics.install()
    metric: Any = Average()
    for score in SCORES[idist.get_rank()]:
        metric.update(score)
    return ignite.distributed.get_world_size(), metric.compute()
