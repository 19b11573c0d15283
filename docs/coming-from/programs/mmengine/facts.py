import mmengine.dist as dist
import torch

torch.distributed.init_process_group("gloo")  # init_dist("pytorch") needs a GPU
rank, size = dist.get_dist_info()
seen = torch.tensor(10 + rank)
dist.all_reduce(seen)
names = dist.all_gather_object(f"worker {rank}")
box = [{"lr": 0.125} if rank == 0 else None]
dist.broadcast_object_list(box, src=0)
print(f"rank {rank} of {size}: seen {seen.item()}, {names}, {box[0]}")
torch.distributed.destroy_process_group()
