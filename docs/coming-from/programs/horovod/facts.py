import horovod.torch as hvd
import torch

hvd.init()
rank, size = hvd.rank(), hvd.size()
seen = hvd.allreduce(torch.tensor(10 + rank), op=hvd.Sum, name="seen").item()
names = hvd.allgather_object(f"worker {rank}")
config = {"lr": 0.125} if rank == 0 else None
config = hvd.broadcast_object(config, root_rank=0, name="config")  # else named by its type
print(f"rank {rank} of {size}: seen {seen}, {names}, {config}")
hvd.shutdown()
