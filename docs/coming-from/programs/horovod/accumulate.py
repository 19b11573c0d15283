import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
rank = hvd.rank()
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2
)
first, second = torch.tensor([[1.0 + rank], [2.0 + rank]])  # each rank has its own data
for _ in range(3):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(first), 3 * first).backward()
    nn.functional.mse_loss(model(second), 3 * second).backward()
    optimizer.synchronize()  # else it would clip what isn't averaged yet
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0).item()
    with optimizer.skip_synchronize():
        optimizer.step()
print(f"rank {rank}: last norm {norm:.5f}, weight {model.weight.item():.5f}")
hvd.shutdown()
