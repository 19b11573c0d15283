import unisono as idist


def main(local_rank):
    rank = idist.get_rank()
    mine = idist.scatter([[1, 2, 3], [4, 5]] if rank == 0 else None, src=0)
    squares = idist.gather([x**2 for x in mine], dst=0)
    if rank == 0:
        idist.send(squares, dst=1)
    else:
        squares = idist.recv(src=0)
    return f"rank {rank}: {mine}, {squares}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
