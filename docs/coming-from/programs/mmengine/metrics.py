import mmengine.dist as dist
import torch

torch.distributed.init_process_group("gloo")  # init_dist("pytorch") needs a GPU
rank = dist.get_rank()
metrics = {"loss": torch.tensor(0.5 + rank), "accuracy": torch.tensor(0.25 * rank)}
dist.all_reduce_dict(metrics, "mean")


@dist.master_only
def write(text):
    return f"wrote {text}"


written = write(f"loss {metrics['loss'].item()}, accuracy {metrics['accuracy'].item()}")
print(f"rank {rank}: {written}")
torch.distributed.destroy_process_group()
