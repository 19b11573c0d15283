"""Grow a random forest on several workers: data-parallel work that has no gradients.

    python examples/forest.py                           alone
    python -m unisono run -n 3 examples/forest.py       three processes

Each worker grows some of the trees, and the votes of all are added. The seed of a tree is its
number, and integers add up exactly: any number of workers gets the same forest, bit for bit.
Needs scikit-learn: python -m pip install "unisono[examples]"
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.tree import DecisionTreeClassifier

import unisono as idist

CLASSES = 10


def load() -> dict[str, Any]:
    """Load 1,797 images of digits: [n, 64] and labels [n]; every fifth is held out."""
    images, labels = load_digits(return_X_y=True)
    is_held_out = np.arange(len(labels)) % 5 == 0
    return {
        "training": (images[~is_held_out], labels[~is_held_out]),
        "held out": (images[is_held_out], labels[is_held_out]),
    }


def grow(number: int, images: Any, labels: Any) -> DecisionTreeClassifier:
    """Grow one tree from a sample of the images."""
    rows = np.random.default_rng(number).integers(len(labels), size=len(labels))
    tree = DecisionTreeClassifier(max_features="sqrt", random_state=number)
    return tree.fit(images[rows], labels[rows])


def work(local_rank: int, trees: int) -> dict[str, Any]:
    """Do one worker's part; every worker gets the same result."""
    data = idist.shared(load)  # one copy on each host, however many workers it has
    images, labels = data["held out"]
    votes = torch.zeros(len(images), CLASSES, dtype=torch.int64)
    leaves = {"sum": 0, "most": 0}
    for number in range(idist.get_rank(), trees, idist.get_world_size()):
        tree = grow(number, *data["training"])
        votes += torch.nn.functional.one_hot(torch.from_numpy(tree.predict(images)), CLASSES)
        leaves["sum"] += tree.get_n_leaves()
        leaves["most"] = max(leaves["most"], tree.get_n_leaves())

    votes = idist.all_reduce(votes)
    mean_leaves = idist.all_reduce(leaves["sum"]) / trees
    result = {
        "accuracy": float((votes.argmax(1).numpy() == labels).mean()),
        "mean_leaves": mean_leaves,
        "most_leaves": idist.all_reduce(leaves["most"], "max"),
        "votes": hashlib.sha256(votes.numpy().tobytes()).hexdigest()[:16],
    }
    if idist.is_main_process():
        print(f"{trees} trees on {idist.get_world_size()} workers")
        print(f"leaves: {mean_leaves:.2f} on average, {result['most_leaves']} at most")
        print(f"held-out accuracy: {result['accuracy']:.4f}")
        print(f"digest of the votes: {result['votes']}")
    return result


def count(text: str) -> int:
    """Read a number of at least 1 from the command line."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> None:
    """Read the command line and grow the forest."""
    parser = argparse.ArgumentParser(description="Grow a random forest on several workers.")
    parser.add_argument("--backend", help="such as gloo, mpi4py, threads")
    parser.add_argument("--trees", type=count, default=60)
    options = parser.parse_args()
    try:
        with idist.Parallel(options.backend) as parallel:
            parallel.run(work, options.trees)
    except (idist.errors.ArgumentError, idist.errors.BackendError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
