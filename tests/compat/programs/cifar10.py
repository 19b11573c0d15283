"""In the shape of ignite's cifar10 example, with data of its own making."""

import argparse

import ignite.distributed as idist
import torch
from torch import nn
from torch.utils.data import TensorDataset


def get_dataflow(config):
    with idist.one_rank_first(local=True):
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(32, 8), torch.randint(0, 3, (32,)))
    return idist.auto_dataloader(data, batch_size=config["batch_size"], num_workers=0, shuffle=True)


def training(local_rank, config):
    rank = idist.get_rank()
    torch.manual_seed(config["seed"] + rank)
    loader = get_dataflow(config)
    config["num_iters_per_epoch"] = len(loader)
    model = idist.auto_model(nn.Linear(8, 3))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    criterion = nn.CrossEntropyLoss().to(idist.device())
    for epoch in range(2):
        loader.sampler.set_epoch(epoch) if hasattr(loader.sampler, "set_epoch") else None
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x.to(idist.device())), y.to(idist.device()))
            loss.backward()
            optimizer.step()
    seen = idist.all_reduce(tensor=len(loader) * loader.batch_size, op="SUM")
    idist.barrier()
    if rank == 0:
        nodes = idist.get_nnodes(), idist.get_nproc_per_node(), idist.get_local_rank()
        print("RESULT", idist.get_world_size(), seen, nodes, bool(loss.isfinite()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend")
    parser.add_argument("--nproc_per_node")
    asked = parser.parse_args()
    count = asked.nproc_per_node and int(asked.nproc_per_node)
    with idist.Parallel(backend=asked.backend, nproc_per_node=count) as parallel:
        parallel.run(training, {"seed": 543, "batch_size": 8})
