"""Sweep parameters on workers that stay warm, then train the best choice on all of them.

    python examples/sweep.py                  on two workers
    python examples/sweep.py --workers 4      on four: the same table, sooner

First each worker trains whichever setting comes next, by itself; then all of them train the best
setting together. The processes are the same for both, and start once.
Needs scikit-learn for its data: python -m pip install "unisono[examples]"
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import unisono as idist

RATES = (0.01, 0.1, 0.5)
WIDTHS = (8, 32)
BATCH_SIZE = 64  # of all workers together


def load() -> tuple[Tensor, Tensor]:
    """Load 1,797 images [n, 64] and their labels [n]."""
    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float64) / 16, torch.tensor(digits.target)


def train(
    setting: dict[str, Any],
    data: tuple[Tensor, Tensor],
    epochs: int,
    rank: int = 0,
    world_size: int = 1,
) -> float:
    """Train with one setting, as one of `world_size` workers; give the held-out accuracy."""
    torch.set_num_threads(1)  # the workers share this machine's cores
    images, labels = data
    is_held_out = torch.arange(len(labels)) % 5 == 0
    rows = (~is_held_out).nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(64, setting["width"]), nn.ReLU(), nn.Linear(setting["width"], 10))
    for parameter in net.double().parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    model = idist.auto_model(net) if world_size > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), lr=setting["rate"], momentum=0.9)
    for _ in range(epochs):
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(BATCH_SIZE):
            mine = batch.tensor_split(world_size)[rank]
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine], reduction="sum")
            optimizer.zero_grad()
            (loss * world_size / len(batch)).backward()
            optimizer.step()
    with torch.no_grad():
        predictions = net(images[is_held_out]).argmax(1)
    return float((predictions == labels[is_held_out]).double().mean())


def together(
    local_rank: int, setting: dict[str, Any], data: tuple[Tensor, Tensor], epochs: int
) -> float:
    """Train with one setting on all workers."""
    return train(setting, data, epochs, idist.get_rank(), idist.get_world_size())


def sweep(workers: int, epochs: int, backend: str | None) -> dict[str, Any]:
    """Try every setting, and train the best one for three times as long."""
    settings = [{"rate": rate, "width": width} for rate, width in itertools.product(RATES, WIDTHS)]
    data = load()  # small enough to go to the workers with every setting
    with idist.WorkerPool(backend, nproc_per_node=workers) as pool:
        begin = time.perf_counter()
        alone = functools.partial(train, data=data, epochs=epochs)
        accuracies = pool.map(alone, settings)  # each by whichever worker is free
        seconds = time.perf_counter() - begin
        best = settings[max(range(len(settings)), key=accuracies.__getitem__)]
        final = pool.run(together, best, data, 3 * epochs)  # the same on every worker
    for setting, accuracy in zip(settings, accuracies, strict=True):
        print(f"rate {setting['rate']:<5} width {setting['width']:<3} accuracy {accuracy:.4f}")
    print(f"{len(settings)} settings on {workers} workers: {seconds:.1f} s")
    print(f"best: {best}; trained for longer by all workers: accuracy {final[0]:.4f}")
    return {"accuracies": accuracies, "best": best, "final": final}


def count(text: str) -> int:
    """Read a number of at least 1 from the command line."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    """Read the command line and sweep."""
    parser = argparse.ArgumentParser(description="Sweep parameters on workers that stay warm.")
    parser.add_argument("--workers", type=count, default=2)
    parser.add_argument("--epochs", type=count, default=5)
    parser.add_argument("--backend", default="gloo", help="such as gloo, nccl, threads")
    options = parser.parse_args()
    try:
        sweep(options.workers, options.epochs, options.backend)
    except (idist.errors.ArgumentError, idist.errors.BackendError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
