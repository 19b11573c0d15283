"""How a module trains data-parallel on ``torch.distributed``: by torch's own wrappers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

__all__ = ("wrap",)


def wrap(module: nn.Module, wrapper: str, device: torch.device, **options: Any) -> nn.Module | None:
    """Wrap in ``DistributedDataParallel``, or shard with ``fully_shard``.

    Collective over all ranks.

    Args:
        module: on `device`.
        wrapper: ``"ddp"`` or ``"fsdp"``.
        device: of this replica.
        options: of the wrapper.

    Returns:
        The wrapped module; `module` itself, sharded, for ``"fsdp"``; None for another wrapper.
    """
    if wrapper == "ddp":
        is_trainable = any(parameter.requires_grad for parameter in module.parameters())
        if not is_trainable:
            return module  # which DistributedDataParallel refuses
        ids = None if device.type == "cpu" else [device]
        return nn.parallel.DistributedDataParallel(module, device_ids=ids, **options)
    if wrapper == "fsdp":
        fsdp: Any = importlib.import_module("torch.distributed.fsdp")
        meshes: Any = importlib.import_module("torch.distributed.device_mesh")
        size = torch.distributed.get_world_size()
        mesh = options.pop("mesh", None) or meshes.init_device_mesh(device.type, (size,))
        sharded: nn.Module = fsdp.fully_shard(module, mesh=mesh, **options)
        return sharded
    return None
