import mmengine.dist as dist
import torch
from torch.utils.data import DistributedSampler

torch.distributed.init_process_group("gloo")  # init_dist("pytorch") needs a GPU
dataset = list(range(7))
sampler = DistributedSampler(dataset, shuffle=False)  # repeats a row: 4 on each rank
part = [dataset[index] ** 2 for index in sampler]
results = dist.collect_results(part, len(dataset), device="cpu")
print(f"rank {dist.get_rank()}: {results}")
torch.distributed.destroy_process_group()
