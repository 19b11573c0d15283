"""Where the tensors of a container are, and how they get elsewhere, as in ``mmengine.dist``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.errors import ArgumentError

__all__ = ("cast_data_device", "get_data_device")


def get_data_device(data: Any) -> torch.device:
    """Give the one device of a tensor, or of all tensors in a container. Local."""
    if isinstance(data, Tensor):
        return data.device
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise ArgumentError(f"a tensor, or a list or dict of tensors is needed: {data!r}")
    found = {get_data_device(v) for v in (data.values() if isinstance(data, Mapping) else data)}
    if len(found) != 1:
        raise ArgumentError(
            f"the tensors should be on one device, not on {sorted(map(str, found))}"
        )
    return found.pop()


def cast_data_device(data: Any, device: torch.device, out: Any = None) -> Any:
    """Move the tensors of a container to a device; with `out` copy them there too. Local."""
    if out is not None and (type(data) is not type(out) or isinstance(out, set)):
        raise ArgumentError(
            f"out should be a {type(data).__qualname__} as the data is, and no set: "
            f"{type(out).__qualname__}"
        )
    if isinstance(data, Tensor):
        moved = data.to(device)
        if out is not None:
            with torch.no_grad():
                out.copy_(moved)
        return moved
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise ArgumentError(f"a tensor, or a list or dict of tensors is needed: {data!r}")
    if out is not None and len(out) != len(list(data)):
        raise ArgumentError(f"out has {len(out)} items, the data {len(list(data))}")
    if isinstance(data, Mapping):
        into = out if out is not None else dict.fromkeys(data)
        return {key: cast_data_device(item, device, into[key]) for key, item in data.items()}
    items = list(data)
    places = list(out) if out is not None else [None] * len(items)
    cast = [cast_data_device(i, device, o) for i, o in zip(items, places, strict=True)]
    return tuple(cast) if isinstance(data, tuple) else cast
