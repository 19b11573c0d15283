"""Add up one number from every rank, on ranks that are actors of Ray."""

import unisono as idist


def work(local_rank: int) -> int:
    """Run on every rank."""
    return idist.all_reduce(idist.get_rank() + 1)


if __name__ == "__main__":
    print(idist.spawn("gloo", work, nproc_per_node=2, launcher="ray"))
