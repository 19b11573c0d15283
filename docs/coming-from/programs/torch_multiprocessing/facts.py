import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, size, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    seen = torch.tensor(10 + rank)
    dist.all_reduce(seen)
    names = [None] * size
    dist.all_gather_object(names, f"worker {rank}")
    box = [{"lr": 0.125} if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    print(f"rank {rank} of {size}: seen {seen.item()}, {names}, {box[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (2, f"{folder}/store"), nprocs=2)
