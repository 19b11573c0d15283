import torch
from torch import nn

import unisono as idist


def main(local_rank):
    rank = idist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    first, second = torch.tensor([[1.0 + rank], [2.0 + rank]])  # each rank has its own data
    for _ in range(3):
        optimizer.zero_grad()
        with idist.no_sync(model):
            nn.functional.mse_loss(model(first), 3 * first).backward()
        nn.functional.mse_loss(model(second), 3 * second).backward()  # averages both
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0).item()
        optimizer.step()
    weight = idist.unwrap_model(model).weight.item()
    return f"rank {rank}: last norm {norm:.5f}, weight {weight:.5f}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
