import torch
from accelerate import Accelerator, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x, x_test = torch.linspace(-1, 1, 16)[:, None], torch.linspace(-1, 1, 11)[:, None]
train, test = TensorDataset(x, 2 * x + 1), TensorDataset(x_test, 2 * x_test + 1)


def main():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train, batch_size=4)  # on each rank
    test_loader = DataLoader(test, batch_size=4)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()

    errors = []
    with torch.no_grad():
        for inputs, targets in test_loader:
            errors.append(accelerator.gather_for_metrics((model(inputs) - targets).abs()))
    errors = torch.cat(errors)
    rank = accelerator.process_index
    print(f"rank {rank}: error {errors.mean():.5f} over {len(errors)} rows")


main()  # its models go before the process group does
PartialState().destroy_process_group()
