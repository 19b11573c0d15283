"""This rank's part of a whole tensor, where a model or an optimizer has sharded ones."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.errors import PayloadError
from unisono.training.agreement import is_sharded


def local_part(like: object, saved: Any, where: str) -> Any:
    """Cut this rank's part out of a whole tensor."""
    if not is_sharded(like) or not isinstance(saved, Tensor) or is_sharded(saved):
        return saved
    target: Any = like
    if target.shape != saved.shape:
        return saved  # which is refused where it is loaded
    spread: Any = importlib.import_module("torch.distributed.tensor")
    if any(type(each) not in (spread.Shard, spread.Replicate) for each in target.placements):
        raise _unknown(where, target)
    everywhere = [spread.Replicate()] * target.device_mesh.ndim
    whole = spread.DTensor.from_local(
        saved.detach(), target.device_mesh, everywhere, run_check=False
    )
    part = whole.redistribute(placements=target.placements)
    if part.to_local().shape != target.to_local().shape:
        raise _unknown(where, target)
    return part


def _unknown(where: str, target: Any) -> PayloadError:
    return PayloadError(
        f"{where} doesn't fit: a whole tensor was saved, and isn't cut for one that is spread as "
        f"{target.placements}: save it with this model, or load it before the model is sharded"
    )


def optimizer_parts(optimizer: torch.optim.Optimizer, saved: Any, where: str) -> Any:
    """Cut this rank's parts out of what an optimizer of whole tensors saved."""
    params = [item for group in optimizer.param_groups for item in group["params"]]
    is_known = isinstance(saved, Mapping) and isinstance(saved.get("state"), Mapping)
    if not is_known or not any(map(is_sharded, params)):
        return saved
    names = [name for group in saved.get("param_groups", ()) for name in group["params"]]
    likes = dict(zip(names, params, strict=False))  # which the optimizer checks
    state = {
        key: _state_parts(likes.get(key), item, f"{where}['state'][{key!r}]")
        for key, item in saved["state"].items()
    }
    return {**saved, "state": state}


def _state_parts(param: Any, state: Any, where: str) -> Any:
    if not is_sharded(param) or not isinstance(state, Mapping):
        return state
    for name, item in state.items():
        is_whole = isinstance(item, Tensor) and not is_sharded(item) and item.numel() > 1
        if is_whole and item.shape != param.shape:
            raise PayloadError(
                f"{where}[{name!r}] doesn't fit: a whole tensor of shape {tuple(item.shape)} was "
                f"saved, for a sharded parameter of shape {tuple(param.shape)}"
            )
    return {name: local_part(param, item, f"{where}[{name!r}]") for name, item in state.items()}
