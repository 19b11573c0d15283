import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
rank, size = hvd.rank(), hvd.size()
model = nn.Linear(1, 1, bias=False)
nn.init.constant_(model.weight, float(rank))  # as if each rank had drawn its own
lr = 0.01 * size if rank == 0 else 0.0  # as if rank 0 alone had read it
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
begin = model.weight.item()
x = torch.tensor([[1.0 + rank]])  # each rank has its own data
for _ in range(5):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), 3 * x).backward()
    optimizer.step()
lr, end = optimizer.param_groups[0]["lr"], model.weight.item()
print(f"rank {rank}: lr {lr}, weight from {begin} to {end:.5f}")
hvd.shutdown()
