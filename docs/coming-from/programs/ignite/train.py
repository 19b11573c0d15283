import ignite.distributed as idist
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

x, x_test = torch.linspace(-1, 1, 16)[:, None], torch.linspace(-1, 1, 11)[:, None]
train, test = TensorDataset(x, 2 * x + 1), TensorDataset(x_test, 2 * x_test + 1)


def main(local_rank):
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(train, batch_size=8, shuffle=False)  # 4 on each rank
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    # auto_dataloader would repeat a row, so that every rank has 6.
    rank, size = idist.get_rank(), idist.get_world_size()
    mine = Subset(test, range(rank, len(test), size))
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in DataLoader(mine, batch_size=4):
            total += (model.module(inputs) - targets).abs().sum().item()
            count += len(inputs)
    total, count = idist.all_reduce(total), idist.all_reduce(count)
    print(f"rank {rank}: error {total / count:.5f} over {count} rows")


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
