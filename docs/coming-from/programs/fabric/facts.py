import torch
from lightning_fabric import Fabric


def main(fabric):
    rank, size = fabric.global_rank, fabric.world_size
    seen = fabric.all_reduce(torch.tensor(10 + rank), reduce_op="sum").item()
    numbers = fabric.all_gather(torch.tensor(rank))  # tensors only
    names = [f"worker {number}" for number in numbers.tolist()]
    config = fabric.broadcast({"lr": 0.125} if rank == 0 else None, src=0)
    print(f"rank {rank} of {size}: seen {seen}, {names}, {config}")


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", strategy="ddp_spawn", devices=2)
    fabric.launch(main)
