"""Train on any number of ranks, and resume from the last epoch after a restart."""

import os

import torch
from torch import nn

import unisono as idist

x = torch.arange(16.0).reshape(16, 1) / 16
dataset = torch.utils.data.TensorDataset(x, 2 * x)
restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main(local_rank: int) -> None:
    """Run on every rank, at every attempt."""
    model = idist.auto_model(nn.Linear(1, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = idist.auto_dataloader(dataset, batch_size=8)  # of all ranks together
    state = {"model": model, "optimizer": optimizer, "epoch": 0}

    checkpoints = idist.CheckpointManager("checkpoints", keep=2)
    if (path := checkpoints.latest()) is not None:
        state = idist.load_checkpoint(path, into=state)

    for epoch in range(state["epoch"], 4):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if idist.is_main_process():
            print(f"attempt {restarts}: epoch {epoch} on {idist.get_world_size()} ranks")
        state["epoch"] = epoch + 1
        checkpoints.save(state, step=epoch)
        if epoch == 1 and restarts == 0 and idist.get_rank() == 1:
            raise RuntimeError("a failure, for this example")


if __name__ == "__main__":
    with idist.Parallel() as parallel:
        parallel.run(main)
