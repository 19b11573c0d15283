import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

x, x_test = torch.linspace(-1, 1, 16)[:, None], torch.linspace(-1, 1, 11)[:, None]
train, test = TensorDataset(x, 2 * x + 1), TensorDataset(x_test, 2 * x_test + 1)


def main():
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train, batch_size=4, sampler=DistributedSampler(train, shuffle=False))
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    # DistributedSampler would repeat a row, so that every rank has 6.
    mine = Subset(test, range(rank, len(test), size))
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for inputs, targets in DataLoader(mine, batch_size=4):
            error = (model.module(inputs) - targets).abs().sum().item()
            sums += torch.tensor([error, len(inputs)], dtype=torch.float64)
    dist.all_reduce(sums)
    print(f"rank {rank}: error {sums[0] / sums[1]:.5f} over {int(sums[1])} rows")


dist.init_process_group("gloo")
main()  # its models go before the process group does
dist.destroy_process_group()
