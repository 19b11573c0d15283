import torch
from torch import nn

import unisono as idist


def main(local_rank):
    rank, size = idist.get_rank(), idist.get_world_size()
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, float(rank))  # as if each rank had drawn its own
    lr = 0.01 * size if rank == 0 else 0.0  # as if rank 0 alone had read it
    model = idist.auto_model(model)  # all begin with the values of rank 0
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    idist.broadcast_optimizer_state(optimizer)
    begin = idist.unwrap_model(model).weight.item()
    x = torch.tensor([[1.0 + rank]])  # each rank has its own data
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), 3 * x).backward()
        optimizer.step()
    lr, end = optimizer.param_groups[0]["lr"], idist.unwrap_model(model).weight.item()
    return f"rank {rank}: lr {lr}, weight from {begin} to {end:.5f}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
