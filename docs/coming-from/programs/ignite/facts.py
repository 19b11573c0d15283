import ignite.distributed as idist


def main(local_rank):
    rank, size = idist.get_rank(), idist.get_world_size()
    seen = idist.all_reduce(10 + rank)
    names = idist.all_gather(f"worker {rank}")
    config = {"lr": idist.broadcast(0.125 if rank == 0 else None, src=0, safe_mode=True)}
    print(f"rank {rank} of {size}: seen {seen}, {names}, {config}")


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
