"""Train a small net on real handwritten digits, however it is started.

    python examples/digits.py                                         alone
    python examples/digits.py --backend gloo --nproc-per-node 2       two processes
    python examples/digits.py --backend threads --nproc-per-node 2    two threads of one process
    torchrun --nproc-per-node 2 examples/digits.py                    two processes of torchrun
    mpirun -n 2 python examples/digits.py --backend mpi4py            two processes of MPI

Every way ends with the same parameters, but for rounding: compare the checksums.
Needs scikit-learn for its digits: python -m pip install "unisono[examples]"
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import unisono as idist

BATCH_SIZE = 64  # of all workers together
# The number of workers decides in which order gradients are added, and so how they are rounded:
# after 20 epochs float64 has parameters equal to 1e-12, float32 only to about 1e-3.
DTYPE = torch.float64


def load() -> tuple[Tensor, Tensor]:
    """Load 1,797 images [n, 64] from 0 to 1 and their labels [n]."""
    digits = load_digits()
    return torch.tensor(digits.data, dtype=DTYPE) / 16, torch.tensor(digits.target)


def share(rows: Tensor) -> Tensor:
    """Give this worker's part; parts may differ in size by one."""
    return rows.tensor_split(idist.get_world_size())[idist.get_rank()]


def make_model(generator: torch.Generator) -> nn.Module:
    """Make the same model on every worker."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(DTYPE)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_normal_(parameter, generator=generator)
        else:
            nn.init.zeros_(parameter)
    return model


def train(local_rank: int, data: tuple[Tensor, Tensor], epochs: int, seed: int) -> dict[str, Any]:
    """Train in one worker; every worker runs this."""
    torch.set_num_threads(1)  # the workers share this machine's cores
    seed = idist.broadcast(seed, src=0)
    # Workers that are threads share torch's global generator: this one is their own.
    generator = torch.Generator().manual_seed(seed)
    device = idist.device()
    images, labels = (tensor.to(device) for tensor in data)
    is_held_out = torch.arange(len(labels), device=device) % 5 == 0
    held_out_images, held_out_labels = images[is_held_out], labels[is_held_out]
    images, labels = images[~is_held_out], labels[~is_held_out]
    model = idist.auto_model(make_model(generator))  # its gradients are the mean of all workers'
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))

    for epoch in range(epochs):
        loss_sum, correct = 0.0, 0
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH_SIZE):
            mine = share(batch).to(device)
            logits = model(images[mine])
            loss = nn.functional.cross_entropy(logits, labels[mine], reduction="sum")
            optimizer.zero_grad()
            # By the whole batch's size, and not by that of this part: right for parts of any size.
            (loss * idist.get_world_size() / len(batch)).backward()
            optimizer.step()
            loss_sum += loss.item()
            correct += int((logits.argmax(1) == labels[mine]).sum())
        sums = idist.all_reduce({"loss": loss_sum, "correct": correct})
        if idist.is_main_process() and (epoch + 1) % 5 == 0:
            loss_mean, share_right = (sums[name] / len(labels) for name in ("loss", "correct"))
            print(f"epoch {epoch + 1}: loss {loss_mean:.4f}, accuracy {share_right:.4f}")

    model = idist.unwrap_model(model)
    with torch.no_grad():
        predictions = idist.all_gather(model(share(held_out_images)).argmax(1))
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    return {
        "accuracy": float((predictions == held_out_labels).double().mean()),
        "world_size": idist.get_world_size(),
        "model": idist.model_name(),
        "backend": idist.backend(),
        "workers": idist.all_gather(f"rank {idist.get_rank()} on {idist.hostname()}, {device}"),
        "checksums": idist.all_gather(float(flat.abs().sum())),  # of each worker's parameters
        "parameters": flat.tolist(),
    }


@idist.one_rank_only(with_barrier=True)  # if rank 0 can't write, every rank hears of it
def tell(result: dict[str, Any], path: Path | None) -> None:
    """Print what came out, and write all of it to a file if one was asked for."""
    print(f"workers: {'; '.join(result['workers'])} ({result['model']})")
    print(f"held-out accuracy: {result['accuracy']:.4f}")
    print(f"checksum of parameters: {', '.join(f'{sum_:.8f}' for sum_ in result['checksums'])}")
    if path is not None:
        path.write_text(json.dumps(result))


def work(local_rank: int, epochs: int, seed: int, path: Path | None) -> None:
    """Do one worker's part."""
    tell(train(local_rank, load(), epochs, seed), path)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description="Train a small net on handwritten digits.")
    parser.add_argument("--backend", help="such as gloo, nccl, mpi4py, threads")
    parser.add_argument("--nproc-per-node", type=int, help="workers to start; not under a launcher")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="file that rank 0 writes")
    options = parser.parse_args()
    try:
        with idist.Parallel(options.backend, nproc_per_node=options.nproc_per_node) as parallel:
            parallel.run(work, options.epochs, options.seed, options.json)
    except (idist.errors.ArgumentError, idist.errors.BackendError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
