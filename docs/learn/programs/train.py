"""Train a classifier."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono as idist


def points(count: int, seed: int) -> TensorDataset:
    """Draw points of a square; the label says whether a point lies within a circle."""
    generator = torch.Generator().manual_seed(seed)
    xy = 2 * torch.rand(count, 2, generator=generator) - 1
    return TensorDataset(xy, (xy.norm(dim=1) < 0.8).long())


def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Give the share of points that the model labels correctly."""

    def is_right(batch: list[torch.Tensor]) -> torch.Tensor:
        xy, labels = batch
        return model(xy).argmax(1) == labels

    model.eval()
    right = idist.evaluate(is_right, dataset, batch_size=96)
    return int(right.sum()) / len(dataset)


def train(local_rank: int, options: argparse.Namespace) -> None:
    """Train for some epochs, with a checkpoint after each."""
    torch.manual_seed(0)
    model = idist.auto_model(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.02))
    loader = idist.auto_dataloader(points(960, seed=1), batch_size=48, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * len(loader), gamma=0.5)
    validation = points(250, seed=30)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0}
    if options.resume:
        state = idist.load_checkpoint("last.pt", into=state)
    for epoch in range(state["epoch"], options.epochs):
        model.train()
        loader.set_epoch(epoch)
        total = 0.0
        for xy, labels in loader:
            loss = nn.functional.cross_entropy(model(xy), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        mean = idist.reduce_mean(total / len(loader))
        right = accuracy(model, validation)
        lr = scheduler.get_last_lr()[0]
        if idist.is_main_process():
            print(f"epoch {epoch}: loss {mean:.2f}, accuracy {right:.1%}, lr {lr}")
        state["epoch"] = epoch + 1
        idist.save_checkpoint(state, "last.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    with idist.Parallel() as parallel:
        parallel.run(train, parser.parse_args())
