"""In the shape of torch's DDP tutorial: the program makes its own groups."""

import os

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def demo_basic():
    rank, size = dist.get_rank(), dist.get_world_size()
    idist.sync()
    group = idist.new_group(list(range(size)))
    model = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4) * rank).sum().backward()
    optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
    weights = idist.all_gather(model.module.weight.detach()[None], group)
    same = bool((weights == weights[0]).all())
    nodes = idist.get_nnodes(), idist.get_nproc_per_node(), idist.get_node_rank()
    if rank == 0:
        print("RESULT", size, total.item(), same, nodes, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    demo_basic()
    dist.destroy_process_group()
