"""In the shape of mmcv's runner hooks: logs, buffers, seeds and checkpoints by rank."""

import argparse
import tempfile
from pathlib import Path

import mmengine.dist as dist
import torch
from torch import nn


class DistBuffersHook:
    def after_train_epoch(self, model):
        dist.all_reduce_params(list(model.buffers()), op="mean")
        dist.all_reduce_params((p.data for p in model.parameters()), coalesce=True, op="mean")


class CheckpointHook:
    def __init__(self, folder):
        self.folder = folder

    @dist.master_only
    def after_train_epoch(self, model):
        torch.save(model.state_dict(), Path(self.folder) / "latest.pth")


class LoggerHook:
    def after_train_epoch(self, model):
        outputs = {"loss": torch.tensor(float(dist.get_rank())), "iter": torch.tensor(4)}
        dist.all_reduce_dict(outputs, "mean")
        self.last = {key: value.item() for key, value in outputs.items()}


def run():
    folders = [tempfile.mkdtemp() if dist.is_main_process() else None]
    dist.broadcast_object_list(folders, src=0)
    model = nn.BatchNorm1d(3)
    model.train()(torch.randn(4, 3) + dist.get_rank())
    logger = LoggerHook()
    for hook in (DistBuffersHook(), CheckpointHook(folders[0]), logger):
        hook.after_train_epoch(model)
    dist.barrier()
    saved = torch.load(Path(folders[0]) / "latest.pth")
    same = dist.all_gather_object(
        [bool((saved[k] == v).all()) for k, v in model.state_dict().items()]
    )
    if dist.is_main_process():
        print(
            "RESULT",
            dist.get_world_size(),
            logger.last["iter"],
            same == [[True] * 5] * len(same),
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--launcher", default="none")
    asked = parser.parse_args()
    if asked.launcher != "none":
        dist.init_dist(asked.launcher, backend="gloo")
    run()
