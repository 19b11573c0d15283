"""Metrics of other libraries are computed over all ranks, on models that these don't know."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

import unisono as idist

SCORES = [[1.0, 2.0, 3.0], [10.0], [4.0, 4.0]]  # uneven, and their mean isn't that of means


@pytest.mark.parametrize(
    ("backend", "size"), [("threads", 1), ("threads", 3), ("gloo", 2), ("kvstore", 2)]
)
def test_metrics_are_computed_over_all_ranks(
    backend: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ignite knows of models is afterwards what it was."""
    pytest.importorskip("torchmetrics", reason="torchmetrics isn't installed")
    pytest.importorskip("ignite", reason="pytorch-ignite isn't installed")
    utils = importlib.import_module("ignite.distributed.utils")
    for name in ("registered_computation_models", "_model", "_need_to_sync"):
        monkeypatch.setattr(utils, name, getattr(utils, name))
    scores = [score for row in SCORES[:size] for score in row]
    mean = sum(scores) / len(scores)
    is_lone = size > 1 and backend != "gloo"  # which torchmetrics knows
    lone = [["parts.lone"] if is_lone and rank == 0 else [] for rank in range(size)]
    by_rank = idist.spawn(backend, measure, nproc_per_node=size)
    assert by_rank == [((pytest.approx(mean), scores), (size, mean), each) for each in lone]


def measure(_local_rank: int) -> tuple[Any, ...]:
    return by_torchmetrics(), by_ignite(), lone_metrics()


def by_torchmetrics() -> tuple[float, list[float]]:
    import torch
    from torchmetrics import CatMetric, MeanMetric

    from unisono.compat import torchmetrics as ours

    mean, values = MeanMetric(**ours.OPTIONS), CatMetric(**ours.OPTIONS)
    for score in SCORES[idist.get_rank()]:
        mean.update(score)
        values.update(torch.tensor(score))
    return float(mean.compute()), values.compute().reshape(-1).tolist()


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
