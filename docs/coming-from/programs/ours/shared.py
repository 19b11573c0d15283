import torch

import unisono as idist


def main(local_rank):
    table = idist.shared(lambda: torch.arange(1000.0))  # made once on each host
    part = table[idist.get_rank() :: 2].sum().item()
    return f"rank {idist.get_rank()}: {part} of {len(table)} rows"


if __name__ == "__main__":
    for line in idist.spawn("gloo", main, nproc_per_node=2):
        print(line)
