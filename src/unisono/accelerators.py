"""This machine's accelerator, found without initialising it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ("accelerator", "accelerator_count")


def accelerator() -> torch.device | None:
    """Give the kind of accelerator that torch sees here, without index, or None. Local."""
    kind = _kind()
    return kind if kind is not None and accelerator_count() else None


def accelerator_count() -> int:
    """Count the devices that this process may use.

    Local. A process that has initialised CUDA can't be forked any more, and
    ``torch.accelerator.is_available`` does so. Devices are counted without (NVML, on CUDA).
    """
    kind = _kind()
    if kind is None:
        return 0
    module: Any = torch.get_device_module(kind)
    return int(module.device_count())


def _kind() -> torch.device | None:
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later ones say None
        return None
