import horovod.torch as hvd
import torch

hvd.init()
rank = hvd.rank()
metrics = {"loss": torch.tensor(0.5 + rank), "accuracy": torch.tensor(0.25 * rank)}
metrics = {name: hvd.allreduce(value, name=name).item() for name, value in metrics.items()}
written = None
if rank == 0:
    written = f"wrote loss {metrics['loss']}, accuracy {metrics['accuracy']}"
print(f"rank {rank}: {written}")
hvd.shutdown()
