"""``unisono demo``: train a small net on several workers and alone, and compare the parameters."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

import unisono as idist

_ARMS, _POINTS = 3, 600
_EPOCHS, _BATCH_SIZE = 20, 60  # the batch of all workers together
_GOAL = 0.95
# The number of workers decides in which order gradients are added, and so how they are rounded. In
# float32, the training steps amplify these differences until parameters differ by 1e-3.
_DTYPE, _TOLERANCE = torch.float64, 1e-9


def demo(
    *,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Such as gloo, nccl, threads, serial.")
    ] = "gloo",
    nproc_per_node: Annotated[
        int, typer.Option("-n", "--nproc-per-node", min=1, metavar="N", help="Workers to start.")
    ] = 2,
) -> int:
    """Train a small net with several workers and with one, and compare the parameters.

    The net learns which arm of a spiral a point belongs to. Every worker takes a part of each
    batch.

    Returns:
        The exit code: 0 if both have the same parameters and classify well; 1 if not.
    """
    runs = idist.spawn(backend, _train, (True,), nproc_per_node=nproc_per_node)
    (alone,) = idist.spawn("serial", _train, (False,))
    apart = max(float((run["parameters"] - alone["parameters"]).abs().max()) for run in runs)
    accuracy = runs[0]["accuracy"]
    verdict = "the same parameters" if apart <= _TOLERANCE else "DIFFERENT parameters"
    for line in (
        *runs[0]["workers"],
        f"{accuracy:.1%} of {_POINTS} points are classified correctly",
        f"one worker alone reaches {verdict} (at most {apart:.0e} apart)",
        "next, make a script of your own distributed, as docs/learn/training-script.md shows: "
        f"python -m unisono run -n {nproc_per_node} script.py",
    ):
        typer.echo(line)
    return 0 if apart <= _TOLERANCE and accuracy >= _GOAL else 1


def _train(local_rank: int, is_shown: bool) -> dict[str, Any]:
    """Train one worker, which has the same data and the same first parameters as all others."""
    torch.set_num_threads(1)  # the workers share this machine's cores
    generator, device = torch.Generator().manual_seed(0), idist.device()
    points, labels = (tensor.to(device) for tensor in _spiral(generator))
    model = _model(generator).to(device)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for epoch in range(_EPOCHS):
        total = torch.zeros((), dtype=_DTYPE, device=device)
        order = torch.randperm(_POINTS, generator=generator)
        for batch in torch.split(order, _BATCH_SIZE):
            mine = batch.tensor_split(idist.get_world_size())[idist.get_rank()].to(device)
            loss = nn.functional.cross_entropy(model(points[mine]), labels[mine], reduction="sum")
            # Divided by the size of the whole batch, gradients add up even if parts differ in size.
            gradients = torch.autograd.grad(loss / len(batch), parameters)
            for parameter, gradient in zip(parameters, idist.all_reduce(gradients), strict=True):
                parameter.grad = gradient
            optimizer.step()
            total += loss.detach()
        mean = idist.all_reduce(total.item()) / _POINTS
        if is_shown and idist.is_main_process() and (epoch + 1) % 5 == 0:
            typer.echo(f"epoch {epoch + 1}: loss {mean:.4f}")
    who = f"rank {idist.get_rank()}: process {os.getpid()} on {idist.hostname()}, {device}"
    correct = (model(points).argmax(1) == labels).double().mean()
    return {
        "workers": idist.all_gather(f"{who}, {idist.model_name()}"),
        "accuracy": correct.item(),
        "parameters": nn.utils.parameters_to_vector(parameters).detach().cpu(),
    }


def _spiral(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points [600, 2] and the arm of each [600]."""
    labels = torch.arange(_POINTS) % _ARMS
    radius = torch.linspace(0.1, 1, _POINTS, dtype=_DTYPE)
    noise = torch.randn(_POINTS, generator=generator, dtype=_DTYPE) * 0.1
    angle = labels * (2 * math.pi / _ARMS) + radius * 4 + noise
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1), labels


def _model(generator: torch.Generator) -> nn.Module:
    """Build the net with its own generator, because threads as replicas share torch's."""
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    model.append(nn.Linear(32, _ARMS)).to(_DTYPE)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5, generator=generator)
    return model
