"""Train a classifier."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def points(count: int, seed: int) -> TensorDataset:
    """Draw points of a square; the label says whether a point lies within a circle."""
    generator = torch.Generator().manual_seed(seed)
    xy = 2 * torch.rand(count, 2, generator=generator) - 1
    return TensorDataset(xy, (xy.norm(dim=1) < 0.8).long())


def accuracy(model: nn.Module, dataset: TensorDataset, device: torch.device) -> float:
    """Give the share of points that the model labels correctly."""
    right = 0
    model.eval()
    with torch.no_grad():
        for xy, labels in DataLoader(dataset, batch_size=96):
            xy, labels = xy.to(device), labels.to(device)
            right += int((model(xy).argmax(1) == labels).sum())
    return right / len(dataset)


def train(options: argparse.Namespace) -> None:
    """Train for some epochs, with a checkpoint after each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(points(960, seed=1), batch_size=48, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * len(loader), gamma=0.5)
    validation = points(250, seed=30)
    first = 0
    if options.resume:
        state = torch.load("last.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"].cpu())
        first = state["epoch"]
    for epoch in range(first, options.epochs):
        model.train()
        total = 0.0
        for xy, labels in loader:
            xy, labels = xy.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(xy), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item()
        mean = total / len(loader)
        right = accuracy(model, validation, device)
        lr = scheduler.get_last_lr()[0]
        print(f"epoch {epoch}: loss {mean:.2f}, accuracy {right:.1%}, lr {lr}")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "epoch": epoch + 1,
        }
        torch.save(state, "last.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args())
