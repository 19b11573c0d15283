import torch

import unisono as idist


def norm(number):
    return torch.full((4,), float(number)).norm().item()


if __name__ == "__main__":
    with idist.WorkerPool("gloo", nproc_per_node=2) as pool:
        print(f"rank 0: {pool.map(norm, range(5))}")
