import tempfile

import torch
from torch import nn

import unisono as idist


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


def main(local_rank, path):
    model, optimizer = fresh()
    steps(model, optimizer, 3)
    idist.save_checkpoint({"model": model, "optimizer": optimizer, "step": 3}, path)

    model, optimizer = fresh()  # as in the next job
    state = idist.load_checkpoint(path, into={"model": model, "optimizer": optimizer, "step": 0})
    steps(model, optimizer, 3)
    weight = idist.unwrap_model(model).weight.item()
    return f"rank {idist.get_rank()}: from step {state['step']}, weight {weight:.5f}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for line in idist.spawn("gloo", main, (f"{folder}/last.pt",), nproc_per_node=2):
            print(line)
