"""In the shape of mmengine's distributed_training example: results are collected once a batch."""

import argparse

import mmengine.dist as dist
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    if dist.is_distributed():
        model = DistributedDataParallel(model, process_group=dist.get_default_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collected = []
    for step in range(3):
        loss = model(torch.ones(2, 4) * (dist.get_rank() + step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log = {"loss": loss.detach(), "n": torch.tensor(2)}
        dist.all_reduce_dict(log, "mean")
        part = dist.collect_results([{"n": dist.get_rank()}], 6, device="gpu")
        collected += part or []
    seed = dist.sync_random_seed()
    dist.barrier()
    if dist.is_main_process():
        print(
            "RESULT", dist.get_world_size(), len(collected), log["n"].item(), seed >= 0, flush=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", default="none")
    asked = parser.parse_args()
    if asked.launcher != "none":
        dist.init_dist(asked.launcher, backend="gloo", timeout=60)
    train()
