import torch
import torch.multiprocessing as mp


def norm(number):
    return torch.full((4,), float(number)).norm().item()


if __name__ == "__main__":
    with mp.get_context("spawn").Pool(2) as pool:
        print(f"rank 0: {pool.map(norm, range(5))}")
