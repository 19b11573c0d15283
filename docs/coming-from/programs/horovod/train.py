import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

x, x_test = torch.linspace(-1, 1, 16)[:, None], torch.linspace(-1, 1, 11)[:, None]
train, test = TensorDataset(x, 2 * x + 1), TensorDataset(x_test, 2 * x_test + 1)

hvd.init()
rank, size = hvd.rank(), hvd.size()
model = nn.Linear(1, 1)
nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = DistributedSampler(train, num_replicas=size, rank=rank, shuffle=False)
loader = DataLoader(train, batch_size=4, sampler=sampler)
for _ in range(5):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

# DistributedSampler would repeat a row, so that every rank has 6.
mine = Subset(test, range(rank, len(test), size))
total, count = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
with torch.no_grad():
    for inputs, targets in DataLoader(mine, batch_size=4):
        total += (model(inputs) - targets).abs().sum()
        count += len(inputs)
total = hvd.allreduce(total, op=hvd.Sum, name="total").item()
count = hvd.allreduce(count, op=hvd.Sum, name="count").item()
print(f"rank {rank}: error {total / count:.5f} over {count} rows")
hvd.shutdown()
