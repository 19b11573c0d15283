"""Types of the options of `initialize`, `spawn` and others.

A plug-in's own options aren't included: keep them in a ``dict[str, Any]`` and unpack it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from typing_extensions import TypedDict

__all__ = (
    "GroupOptions",
    "InitializeOptions",
    "ModelOptions",
    "ParallelOptions",
    "PoolOptions",
    "SpawnOptions",
)


class ModelOptions(TypedDict, total=False):
    """Options of the built-in communication models (native, Horovod, ...); each takes some."""

    timeout: float | timedelta | None
    store: dist.distributed_c10d.Store | None
    device: torch.device | str | int | None
    device_id: torch.device | int | None
    pg_options: Any
    group_name: str | None
    hosts: str | None
    use_gloo: bool | None
    verbose: int | None


class InitializeOptions(ModelOptions, total=False):
    """Options of `initialize`."""

    rank: int | str | None
    world_size: int | str | None
    init_method: str | None


class _LaunchOptions(ModelOptions, total=False):
    start_method: Literal["forkserver", "spawn", "fork"] | None
    grace: float | timedelta | None
    daemon: bool | None
    launcher_options: Mapping[str, Any] | None


class ParallelOptions(_LaunchOptions, total=False):
    """Options of `Parallel` besides its named parameters."""

    rank: int | str | None
    world_size: int | str | None
    prefix_output: bool | None


class PoolOptions(_LaunchOptions, total=False):
    """Options of `WorkerPool` besides its named parameters."""

    nnodes: int | str | None
    node_rank: int | str | None
    master_addr: str | None
    master_port: int | str | None
    init_method: str | None
    launcher: str | None


class SpawnOptions(PoolOptions, total=False):
    """Options of `spawn` besides its named parameters."""

    prefix_output: bool | None


class GroupOptions(TypedDict, total=False):
    """Options of `new_group`; all but ``timeout`` are for the native communication model only."""

    timeout: float | timedelta | None
    backend: str | None
    pg_options: Any
    group_desc: str | None
    use_local_synchronization: bool
