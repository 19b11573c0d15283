import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

x, x_test = torch.linspace(-1, 1, 16)[:, None], torch.linspace(-1, 1, 11)[:, None]
train, test = TensorDataset(x, 2 * x + 1), TensorDataset(x_test, 2 * x_test + 1)


def main(fabric):
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(train, batch_size=4))  # on each rank
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()

    # setup_dataloaders would repeat a row, so that every rank has 6.
    rank, size = fabric.global_rank, fabric.world_size
    mine = Subset(test, range(rank, len(test), size))
    sums = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in DataLoader(mine, batch_size=4):
            error = (model.module(inputs) - targets).abs().sum()
            sums += torch.stack([error, torch.tensor(float(len(inputs)))])
    sums = fabric.all_reduce(sums, reduce_op="sum")
    print(f"rank {rank}: error {sums[0] / sums[1]:.5f} over {int(sums[1])} rows")


if __name__ == "__main__":
    Fabric(accelerator="cpu", strategy="ddp_spawn", devices=2).launch(main)
