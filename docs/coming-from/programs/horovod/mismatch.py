import horovod.torch as hvd
import torch

hvd.init()
rank = hvd.rank()
try:
    hvd.allreduce(torch.ones(2 + rank), op=hvd.Sum, name="rows")
    refused = "nobody"
except hvd.HorovodInternalError:  # on every rank
    refused = "everybody"
total = hvd.allreduce(torch.ones(2), op=hvd.Sum, name="rows").tolist()
print(f"rank {rank}: {refused} refused, then {total}")
hvd.shutdown()
