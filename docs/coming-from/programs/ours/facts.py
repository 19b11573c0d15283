import unisono as idist


def main(local_rank):
    rank, size = idist.get_rank(), idist.get_world_size()
    seen = idist.all_reduce(10 + rank)
    names = idist.all_gather(f"worker {rank}")
    config = idist.broadcast({"lr": 0.125} if rank == 0 else None, src=0)
    return f"rank {rank} of {size}: seen {seen}, {names}, {config}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
