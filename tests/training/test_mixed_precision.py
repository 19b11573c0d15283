"""Clipping and GradScaler with every kind of optimizer, against one process with all samples."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import unisono as idist
from tests.support.worlds import REAL, alone_and_several_here, run
from unisono.errors import UnsupportedOperation
from unisono.model.training import TrainingHooks
from unisono.models.threads import ThreadsModel
from unisono.registry import unregister_model

STEPS, SIZE = 5, 6
_seeding = threading.Lock()


def network() -> nn.Module:
    with _seeding:  # ranks that are threads share the generator
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def rows(step: int) -> Tensor:
    return torch.sin(torch.arange(SIZE * 4.0).view(SIZE, 4) + step)


def step_of(model: Any, optimizer: Any, scaler: Any, step: int, x: Any, clip: Any) -> Any:
    """Accumulate two halves of a batch, clip and step, as the documented loop does."""
    for index, half in enumerate(x.chunk(2)):
        loss = model(half * (math.inf if step == 2 else 1.0)).pow(2).sum() * 50 / len(x)
        if index == 0:
            with idist.no_sync(model):
                scaler.scale(loss).backward()
        else:
            scaler.scale(loss).backward()
    norm = clip(model, optimizer, scaler, math.inf if step == 3 else 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm


def reference() -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def clip(model: Any, optimizer: Any, scaler: Any, max_norm: float) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    for step in range(STEPS):
        step_of(model, optimizer, scaler, step, rows(step), clip)
    assert scaler.get_scale() == 512.0  # the step with infinite gradients was skipped
    return [item.detach() for item in model.parameters()]


def trains(**options: Any) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **options
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def clip(model: Any, optimizer: Any, scaler: Any, max_norm: float) -> Tensor:
        return idist.clip_grad_norm_(model, max_norm, optimizer=optimizer, scaler=scaler)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            norm = step_of(model, optimizer, scaler, step, rows(step)[rank::size], clip)
            idist.assert_equal([norm, scaler.get_scale()])
    idist.assert_equal([model, optimizer])
    for mine, expected in zip(model.parameters(), reference(), strict=True):
        torch.testing.assert_close(mine.detach(), expected, rtol=1e-4, atol=1e-5)


@alone_and_several_here
def test_a_loop_with_everything_is_that_of_one_process() -> None:
    trains()


@pytest.mark.parametrize(("backend", "size"), REAL[1:])
def test_horovod_s_optimizer_averages_before_it_is_clipped(backend: str, size: int) -> None:
    run(backend, size, with_options)


def with_options(local_rank: int) -> None:
    trains(backward_passes_per_step=2)
    model = idist.auto_model(nn.Linear(1, 1, bias=False))
    optimizer = idist.auto_optim(
        torch.optim.SGD(model.parameters(), lr=1.0), backward_passes_per_step=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Horovod's own, of the step that was left out
        for is_clipped in (True, False):
            optimizer.zero_grad()
            model(torch.ones(1, 1) * idist.get_rank()).sum().backward()
            if is_clipped:
                idist.clip_grad_norm_(model, 1.0)
        optimizer.step()  # the second one's gradients weren't averaged before
    idist.assert_equal(model)


class Averaging(ThreadsModel, TrainingHooks):
    """Averages gradients in the optimizer's step."""

    name = "averaging"
    backends = ("averaging",)

    def wrap_optimizer(
        self, optimizer: Optimizer, *, is_averaged: bool, **options: Any
    ) -> Optimizer:
        return optimizer

    def settle_gradients(self, optimizer: Optimizer) -> Callable[[], None]:
        number = optimizer.param_groups[0]["number"]
        assert idist.all_gather(number) == [number] * idist.get_world_size()
        return lambda: None


def test_gradients_are_averaged_in_the_order_of_the_optimizers() -> None:
    idist.register_model(Averaging)
    try:
        run("averaging", 2, averages)
    finally:
        unregister_model(Averaging)


def averages(local_rank: int) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizers = []
    for number in range(20):
        groups: Any = [{"params": [parameter], "number": number}]
        optimizers.append(idist.auto_optim(torch.optim.SGD(groups, lr=1.0)))
    idist.clip_grad_norm_([parameter], 1.0)
    assert len(optimizers) == 20


@pytest.mark.ranks(2, on="gloo")
def test_a_scaler_of_sharded_gradients_is_refused() -> None:
    model = idist.auto_model(network(), wrapper="fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows(0)).sum().backward()
    grads = [item.grad.full_tensor() for item in model.parameters()]  # type: ignore[union-attr]
    norm = idist.clip_grad_norm_(model, 0.5)
    expected = torch.cat([item.reshape(-1) for item in grads]).norm()
    torch.testing.assert_close(norm, expected)
    with pytest.raises(UnsupportedOperation, match="GradScaler over sharded gradients"):
        scaler: Any = torch.amp.GradScaler("cpu")
        idist.clip_grad_norm_(model, 0.5, optimizer=optimizer, scaler=scaler)


@pytest.mark.ranks(2, on=("threads", "gloo"))
def test_a_rank_out_of_memory_in_the_middle_of_a_step_halves_it_on_all() -> None:
    is_without_sync = idist.backend() == "gloo"

    @idist.find_executable_batch_size(32)
    def train(batch_size: int) -> int:
        model = idist.auto_model(network())
        with idist.no_sync(model) if is_without_sync else nullcontext():
            x = torch.ones(batch_size, 4)
            if idist.get_rank() == 1 and batch_size > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            model(x).sum().backward()
        return batch_size

    assert train() == 8


@pytest.mark.ranks(2, on="threads")
def test_a_result_is_freed_before_a_smaller_batch_is_tried() -> None:
    before: list[weakref.ref[nn.Module]] = []
    freed: list[bool] = []

    @idist.find_executable_batch_size(32)
    def train(batch_size: int) -> tuple[int, nn.Module]:
        freed.extend(each() is None for each in before[-1:])
        model = network()
        before.append(weakref.ref(model))
        if idist.get_rank() and batch_size > 8:
            raise MemoryError
        return batch_size, model

    assert (train()[0], freed) == (8, [True, True])
