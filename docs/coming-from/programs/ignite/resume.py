import tempfile

import ignite.distributed as idist
import torch
from torch import nn


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.tensor([[1.0 + idist.get_rank()]])  # each rank has its own data
        nn.functional.mse_loss(model(x), 3 * x).backward()
        optimizer.step()


def fresh():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = idist.auto_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, idist.auto_optim(optimizer)


def main(local_rank):
    rank = idist.get_rank()
    folder = tempfile.mkdtemp() if rank == 0 else ""
    path = idist.broadcast(folder, src=0, safe_mode=True) + "/last.pt"
    model, optimizer = fresh()
    steps(model, optimizer, 3)
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": 3}, path)
    idist.barrier()

    model, optimizer = fresh()  # as in the next job
    state = torch.load(path)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    steps(model, optimizer, 3)
    weight = model.module.weight.item()
    print(f"rank {rank}: from step {state['step']}, weight {weight:.5f}")


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
