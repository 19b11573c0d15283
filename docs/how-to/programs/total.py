"""Add up one number from every rank, however the ranks are started."""

import unisono as idist


def work(local_rank: int) -> None:
    """Run on every rank."""
    total = idist.all_reduce(idist.get_rank() + 1)
    if idist.is_main_process():
        print(f"{idist.get_world_size()} ranks, total {total}")


if __name__ == "__main__":
    with idist.Parallel() as parallel:
        parallel.run(work)
