"""A rank that hangs, and the error that names it.

    python -m unisono run -n 2 examples/hang.py

Rank 0 waits 5 seconds for rank 1, which is busy elsewhere, and ends with an error that has the
line of rank 1. For ``unisono top`` in another terminal, give it more time: --deadline 600.
"""

from __future__ import annotations

import argparse
import time

import unisono as idist


def load_data() -> None:
    """Stand for a disk that doesn't answer."""
    time.sleep(3600)


def train(local_rank: int) -> None:
    """Run on every rank."""
    for _ in range(3):
        idist.all_reduce(1.0)
    if idist.get_rank() == 1:
        load_data()
    idist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Hang on rank 1.")
    parser.add_argument("--deadline", type=float, default=5.0, metavar="SECONDS")
    options = parser.parse_args()
    with idist.Parallel() as parallel, idist.deadline(options.deadline):
        parallel.run(train)
