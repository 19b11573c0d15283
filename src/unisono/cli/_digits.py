"""A small net learns real handwritten digits, data-parallel: the job of ``unisono demo``.

Only the facade distributes it; the function that shows its progress is an argument.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono as idist

_HELD_OUT = 5  # every fifth image, so that every writer is in both parts
_HIDDEN = 64
_LEARNING_RATE = 0.2
_MOMENTUM = 0.9
Report = Callable[[dict[str, float]], None]
Watch = Callable[[int], AbstractContextManager[Report]]


@dataclass(frozen=True, slots=True)
class Digits:
    """Images [n, 64] in float64 from 0 to 1 and labels [n] in int64: to learn from, and held out.

    Float64 because of what the demo shows. The number of workers decides in which order a
    gradient's terms are added; in float32 the rounding alone, amplified by each step, was seen to
    move parameters by 1e-3 within 15 epochs, in float64 by 1e-15.
    """

    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train. `batch_size` is that of all workers together; only rank 0's `seed` counts."""

    epochs: int
    batch_size: int
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one worker has at the end: all of it is of the whole job but `parameters`, its own."""

    workers: list[dict[str, Any]]
    metrics: dict[str, float]
    predictions: Tensor
    parameters: Tensor
    seconds: float


def load() -> Digits:
    """Load scikit-learn's bundled digits: 1,797 images of 8 by 8 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float64) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    is_held_out = torch.arange(len(labels)) % _HELD_OUT == 0
    return Digits(
        images[~is_held_out], labels[~is_held_out], images[is_held_out], labels[is_held_out]
    )


def train(local_rank: int, digits: Digits, settings: Settings, watch: Watch) -> Outcome:
    """Train on this worker's share of every batch. Collective over all ranks."""
    torch.set_num_threads(1)  # steps are so small that threads only wait, on other workers' cores
    seed = idist.broadcast(settings.seed if idist.is_main_process() else None)
    # A generator of its own: torch's global one is shared by replicas that are threads.
    generator = torch.Generator().manual_seed(seed)
    device = idist.device()
    images, labels = digits.images.to(device), digits.labels.to(device)
    model = _model(generator).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM)
    metrics: dict[str, float] = {}
    started = time.perf_counter()
    with watch(settings.epochs) if idist.is_main_process() else nullcontext(_unseen) as report:
        for _ in range(settings.epochs):
            order = torch.randperm(len(labels), generator=generator)
            batches = [batch.to(device) for batch in torch.split(order, settings.batch_size)]
            metrics = _epoch(model, optimizer, images, labels, batches)
            report(metrics)
    seconds = time.perf_counter() - started
    predictions = idist.all_gather(_predict(model, _share(digits.held_out_images).to(device)))
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    return Outcome(_who(), metrics, predictions.cpu(), parameters.cpu(), seconds)


def _unseen(metrics: dict[str, float]) -> None:
    """Report to nobody."""


def _share(rows: Tensor) -> Tensor:
    """Give this worker's rows: contiguous, and maybe one more than others', or none."""
    return rows.tensor_split(idist.get_world_size())[idist.get_rank()]


def _model(generator: torch.Generator) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 10)).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(parameter)
    return model


def _epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batches: list[Tensor],
) -> dict[str, float]:
    """Learn from each batch once. Collective over all ranks."""
    # Shares may differ in size, so that a mean of means would be wrong: each worker divides the sum
    # of its losses by the size of the whole batch, and the gradients are added.
    parameters = list(model.parameters())
    total = torch.zeros((), dtype=images.dtype, device=images.device)
    correct = torch.zeros((), dtype=torch.int64, device=images.device)
    for batch in batches:
        mine = _share(batch)
        logits = model(images[mine])
        loss = functional.cross_entropy(logits, labels[mine], reduction="sum")
        gradients = idist.all_reduce(list(torch.autograd.grad(loss / len(batch), parameters)))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        total += loss.detach()
        correct += (logits.argmax(1) == labels[mine]).sum()
    sums = idist.all_reduce({"loss": total.item(), "correct": correct.item()})
    return {name: value / len(labels) for name, value in sums.items()}


def _predict(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        predictions: Tensor = model(images).argmax(1)
    return predictions


def _who() -> list[dict[str, Any]]:
    """Learn who ran where. Collective over all ranks."""
    workers: list[dict[str, Any]] = idist.all_gather(
        {
            "rank": idist.get_rank(),
            "local rank": idist.get_local_rank(),
            "node": idist.get_node_rank(),
            "host": idist.hostname(),
            "pid": os.getpid(),
            "device": str(idist.device()),
            "model": idist.model_name(),
            "backend": idist.backend() or "-",
        }
    )
    return workers
