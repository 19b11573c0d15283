"""What two libraries give for the same calls, in words that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ("differences", "outcome")

_BASES = (
    *(ValueError, TypeError, RuntimeError, AssertionError, NotImplementedError, ImportError),
)  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    """Give what a call returned, or which of Python's own errors it raised."""
    try:
        return _plain(call())
    except _BASES as error:
        return {"raises": sorted(base.__name__ for base in _BASES if isinstance(error, base))}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.tolist()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_plain(item) for item in value)]
    if isinstance(value, (Path, torch.device)):
        return f"{type(value).__name__} {value}"
    return value


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Give what differs: ours may have more bases than the error that the other one raises."""
    return {
        name: (theirs[name], ours[name])
        for name in theirs
        if not _is_as_good(theirs[name], ours[name])
    }


def _is_as_good(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, dict) and "raises" in theirs:
        return isinstance(ours, dict) and set(theirs["raises"]) <= set(ours.get("raises", ()))
    return bool(theirs == ours)
