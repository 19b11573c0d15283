import torch
from torch import nn

import unisono as idist


def main(local_rank):
    rank = idist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, float(rank))
    idist.broadcast_params(model)  # all begin with the values of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.tensor([[1.0 + rank]])  # each rank has its own data
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), 3 * x).backward()
        idist.all_reduce_grads(model)
        optimizer.step()
    return f"rank {rank}: weight {model.weight.item():.5f}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
