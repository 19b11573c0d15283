import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
seen = torch.tensor(10 + rank)
dist.all_reduce(seen)
names = [None] * size
dist.all_gather_object(names, f"worker {rank}")
box = [{"lr": 0.125} if rank == 0 else None]
dist.broadcast_object_list(box, src=0)
print(f"rank {rank} of {size}: seen {seen.item()}, {names}, {box[0]}")
dist.destroy_process_group()
