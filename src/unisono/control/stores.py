"""Torch's stores, where the ranks of a job meet."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore


def store_at(*args: Any, **options: Any) -> TCPStore:
    """Make torch's store of a listener that is there. The arguments are those of the store."""
    # With libuv it takes none in torch 2.6; it is known to take one in torch 2.9.
    return TCPStore(*args, **{**options, "use_libuv": torch.__version__ >= "2.9"})
