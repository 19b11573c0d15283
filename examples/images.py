"""Classify images with a convolutional net: train, evaluate exactly, save, and go on from there.

    python examples/images.py                                             alone
    python -m unisono run -n 2 examples/images.py --checkpoint last.pt    two processes
    python -m unisono run -n 3 examples/images.py --checkpoint last.pt --resume --epochs 12

The third command goes on where the second stopped, with another number of workers. Every batch has
the same images however many workers share it, so what is learnt doesn't depend on their number, but
for rounding. Needs scikit-learn for its images: python -m pip install "unisono[examples]"
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as idist

BATCH_SIZE = 60  # of all workers together: 1, 2, 3, 4, 5 and 6 of them get equal shares
TRAINING, HELD_OUT = slice(1440), slice(1440, None)  # whole batches; as many as are left


def load() -> tuple[TensorDataset, ...]:
    """Load 1,440 images [1, 8, 8] with labels to train with, and 357 to evaluate with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    return tuple(TensorDataset(images[part], labels[part]) for part in (TRAINING, HELD_OUT))


def make_model() -> nn.Module:
    """Make a small convolutional net."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


def evaluate(model: nn.Module, dataset: TensorDataset) -> float:
    """Give the accuracy, each image counted once, however unevenly they are shared out."""
    model = idist.unwrap_model(model).eval()  # ranks may have different numbers of batches
    sampler = idist.EvaluationSampler(dataset)
    batches = DataLoader(dataset, batch_size=64, sampler=sampler)
    with torch.no_grad():
        parts = [model(images.to(idist.device())).argmax(1).cpu() for images, _ in batches]
    part = torch.cat([torch.empty(0, dtype=torch.int64), *parts])  # a rank may have no image
    predictions = idist.gather_results(part, len(dataset))
    return float((predictions == dataset.tensors[1]).double().mean())


def train(local_rank: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train in one worker; every worker runs this."""
    torch.set_num_threads(1)  # the workers share this machine's cores
    device = idist.device()
    dataset, held_out = idist.shared(load)  # one copy on each host
    torch.manual_seed(options.seed)  # auto_model gives all workers the weights of rank 0
    model = idist.auto_model(make_model().to(device), sync_bn=True)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = idist.auto_dataloader(dataset, batch_size=BATCH_SIZE)
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if options.resume:
        state = idist.load_checkpoint(options.checkpoint, into=state)

    for epoch in range(state["epoch"], options.epochs):
        model.train()
        loader.set_epoch(epoch)  # another order in each epoch
        losses: list[Tensor] = []
        for images, labels in loader:  # on this worker's device
            with torch.autocast(device.type, torch.bfloat16, enabled=options.bfloat16):
                logits = model(images)
            loss = nn.functional.cross_entropy(logits.float(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        state["epoch"] = epoch + 1
        mean = idist.reduce_mean(torch.stack(losses).mean())
        if idist.is_main_process():
            print(f"epoch {epoch + 1}: loss {mean:.4f}")
        if options.checkpoint:
            idist.save_checkpoint(state, options.checkpoint)  # complete, or the old one stays

    weights = nn.utils.parameters_to_vector(idist.unwrap_model(model).parameters())
    return {
        "accuracy": evaluate(model, held_out),
        "world_size": idist.get_world_size(),
        "checksum": float(weights.detach().double().abs().sum()),
    }


def work(local_rank: int, options: argparse.Namespace) -> None:
    """Train, and say on rank 0 what came out."""
    result = train(local_rank, options)
    if idist.is_main_process():
        print(f"workers: {result['world_size']}")
        print(f"held-out accuracy: {result['accuracy']:.4f}")
        print(f"checksum of parameters: {result['checksum']:.4f}")


def count(text: str) -> int:
    """Read a number of at least 1 from the command line."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Classify images with a convolutional net.")
    parser.add_argument("--backend", help="such as gloo, nccl, mpi4py, threads")
    parser.add_argument("--epochs", type=count, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", metavar="PATH", help="file to save to after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--bfloat16",
        action=argparse.BooleanOptionalAction,
        default=torch.accelerator.is_available(),
        help="compute in mixed precision; by default where there is an accelerator",
    )
    options = parser.parse_args()
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint PATH")
    try:
        with idist.Parallel(options.backend) as parallel:
            parallel.run(work, options)
    except (idist.errors.ArgumentError, idist.errors.BackendError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
