"""This machine's accelerator, detected and counted without initialising it."""

from __future__ import annotations

from typing import Any

import torch


def accelerator() -> torch.device | None:
    """Return the type of accelerator that torch finds here, without index, or None."""
    kind = _kind()
    return kind if kind is not None and accelerator_count() else None


def current_device() -> torch.device:
    """Return the accelerator's current device, or the CPU without one; initialises it."""
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def accelerator_count() -> int:
    """Count the devices that this process may use."""
    # A process that has initialised CUDA can no longer be forked, and
    # ``torch.accelerator.is_available`` initialises it. The count doesn't (by NVML, on CUDA).
    kind = _kind()
    if kind is None:
        return 0
    module: Any = torch.get_device_module(kind)
    return int(module.device_count())


def can_pin_for(device: torch.device) -> bool:
    """Return whether torch's ``DataLoader`` can pin the memory of batches for a device."""
    kind = _kind()
    if kind is None or device.type != kind.type:
        return False
    if kind.type != "cuda" and (kind.type == "mps" or torch.__version__ < "2.9"):
        return False  # loaders would warn, or ignore it; a TorchVersion isn't compared as text
    # A loader would raise if it can't pin: a third-party accelerator may have no pinned memory,
    # and tensors on another default device aren't pinned.
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return False
    return True


def _kind() -> torch.device | None:
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 raises where later versions return None
        return None
