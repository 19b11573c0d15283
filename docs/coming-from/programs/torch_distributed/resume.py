import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.tensor([[1.0 + dist.get_rank()]])  # each rank has its own data
        nn.functional.mse_loss(model(x), 3 * x).backward()
        optimizer.step()


def fresh():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def main():
    rank = dist.get_rank()
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "last.pt")
    model, optimizer = fresh()
    steps(model, optimizer, 3)
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        torch.save(state, path)
    dist.barrier()

    model, optimizer = fresh()  # as in the next job
    state = torch.load(path, map_location="cpu")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    steps(model, optimizer, 3)
    print(f"rank {rank}: from step {state['step']}, weight {model.module.weight.item():.5f}")


dist.init_process_group("gloo")
main()  # its models go before the process group does
dist.destroy_process_group()
