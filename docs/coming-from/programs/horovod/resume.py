import tempfile

import horovod.torch as hvd
import torch
from torch import nn


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.tensor([[1.0 + hvd.rank()]])  # each rank has its own data
        nn.functional.mse_loss(model(x), 3 * x).backward()
        optimizer.step()


def fresh():
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


hvd.init()
rank, path, step = hvd.rank(), f"{tempfile.mkdtemp()}/last.pt", 0
model, optimizer = fresh()
steps(model, optimizer, 3)
if rank == 0:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(state, path)

model, optimizer = fresh()  # as in the next job
if rank == 0:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
step = hvd.broadcast_object(step, root_rank=0)
steps(model, optimizer, 3)
print(f"rank {rank}: from step {step}, weight {model.weight.item():.5f}")
hvd.shutdown()
