import tempfile

import torch
from lightning_fabric import Fabric
from torch import nn


def steps(fabric, model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        x = torch.tensor([[1.0 + fabric.global_rank]])  # each rank has its own data
        fabric.backward(nn.functional.mse_loss(model(x), 3 * x))
        optimizer.step()


def fresh(fabric):
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))


def main(fabric, path):
    model, optimizer = fresh(fabric)
    steps(fabric, model, optimizer, 3)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})

    model, optimizer = fresh(fabric)  # as in the next job
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    steps(fabric, model, optimizer, 3)
    weight = model.module.weight.item()
    print(f"rank {fabric.global_rank}: from step {state['step']}, weight {weight:.5f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        fabric = Fabric(accelerator="cpu", strategy="ddp_spawn", devices=2)
        fabric.launch(main, f"{folder}/last.pt")
