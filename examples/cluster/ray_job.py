"""Train on the workers of a Ray cluster.

    python examples/cluster/ray_job.py --workers 2                            a Ray of its own
    ray start --head && python examples/cluster/ray_job.py --workers 2        the one on this host
    RAY_ADDRESS=head:6379 python examples/cluster/ray_job.py --workers 8      that at this address
    ray job submit -- python examples/cluster/ray_job.py --workers 8          one elsewhere

The program is Ray's driver: it starts the workers as actors, and gets what they return, by rank.
unisono must be installed on all nodes of the cluster. Needs Ray: python -m pip install ray
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import unisono as idist


def train(local_rank: int, steps: int) -> dict[str, Any]:
    """Learn where the points of a circle lie; every worker has points of its own."""
    torch.set_num_threads(1)  # the workers of a host share its cores
    device = idist.device()
    generator = idist.rank_generator(0)
    points = 2 * torch.rand(256, 2, generator=generator) - 1
    labels = (points.square().sum(1, keepdim=True) < 0.5).float()
    points, labels = points.to(device), labels.to(device)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = idist.auto_model(net)  # all start with the weights of rank 0
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.02))
    for _ in range(steps):
        loss = nn.functional.binary_cross_entropy_with_logits(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = int(((model(points) > 0) == (labels > 0)).sum())
    total = idist.all_reduce({"right": right, "seen": len(points)})  # exact, over all workers
    return {
        "worker": f"rank {idist.get_rank()} on {idist.hostname()}",
        "accuracy": total["right"] / total["seen"],
    }


def main() -> None:
    """Read the command line, and train on the cluster."""
    parser = argparse.ArgumentParser(description="Train on the workers of a Ray cluster.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", default="gloo", help="such as gloo or nccl")
    options = parser.parse_args()
    try:
        results = idist.spawn(
            options.backend,
            train,
            args=(options.steps,),
            nproc_per_node=options.workers,
            launcher="ray",
        )
    except (idist.errors.ArgumentError, idist.errors.BackendError) as error:
        parser.error(str(error))
    print("workers:", "; ".join(result["worker"] for result in results))
    print(f"accuracy: {results[0]['accuracy']:.4f}")


if __name__ == "__main__":
    main()
