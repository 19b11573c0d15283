import torch

import unisono as idist


def main(local_rank):
    rank = idist.get_rank()
    try:
        idist.all_reduce(torch.ones(2 + rank))
        refused = "nobody"
    except idist.errors.CollectiveMismatchError:  # on every rank
        refused = "everybody"
    total = idist.all_reduce(torch.ones(2)).tolist()
    return f"rank {rank}: {refused} refused, then {total}"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
