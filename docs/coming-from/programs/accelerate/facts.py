import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

accelerator = Accelerator(cpu=True)
rank, size = accelerator.process_index, accelerator.num_processes
seen = accelerator.reduce(torch.tensor(10 + rank), reduction="sum").item()
names = gather_object([f"worker {rank}"])
config = broadcast_object_list([{"lr": 0.125} if rank == 0 else None])[0]
print(f"rank {rank} of {size}: seen {seen}, {names}, {config}")
accelerator.end_training()
