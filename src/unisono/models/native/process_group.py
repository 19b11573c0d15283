"""Process groups of torch: devices, creation, topology, module wrappers, and gloo's threads."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from unisono.accelerators import accelerator, accelerator_count
from unisono.errors import ArgumentError, BackendUnavailableError
from unisono.topology import RankInfo, Topology

_MARGIN = timedelta(seconds=2)  # between gloo's timeout and the job's: see `join`


def backends_by_device(backend: str) -> dict[str, str]:
    """Return the backend of each device type, parsed from a backend's name."""
    if ":" not in backend:
        devices = dist.Backend.backend_capability.get(backend, ["cpu"])
        return dict.fromkeys(devices, backend)
    table: dict[str, str] = {}
    for pair in backend.split(","):
        device, separator, name = pair.partition(":")
        if not (device and separator and name) or device in table or ":" in name:
            raise ArgumentError(
                f"backend {backend!r}: {pair!r} should be device:backend, each device once, "
                "as in 'cpu:gloo,cuda:nccl'"
            )
        table[device] = name
    return table


def why_no_device(backend: str) -> str | None:
    """Return which device `backend` lacks on this machine, or None if it has one."""
    # Only lists of usable backends need this, because ranks may run on other machines.
    kinds = backends_by_device(backend)
    kind = accelerator()
    if "cpu" in kinds or (kind is not None and kind.type in kinds):
        return None
    return (
        f"it needs a device of type {' or '.join(kinds)}, and torch finds none on this machine: "
        "use gloo here, or start the ranks on machines with such a device"
    )


def choose_device(backend: str, info: RankInfo, choice: Any) -> torch.device:
    """Return a replica's device, after making it the current one."""
    # It is the accelerator if `backend` is torch's default for it or names it, else the CPU. If
    # the launcher leaves only one device visible, its index is 0 for every local rank.
    kind = accelerator()
    if choice is not None:
        device = _as_device(choice, kind)
    elif kind is None or not serves(backend, kind.type):
        return torch.device("cpu")
    else:
        count = accelerator_count()
        # Without a local rank, launchers are taken to number the ranks of a node in a row.
        index = info.rank % count if info.local_rank is None else info.local_rank
        if count == 1:
            index = 0
        if index >= count:
            raise BackendUnavailableError(
                f"backend {backend!r}: local rank {index} has no {kind.type} device of its own, "
                f"{count} are visible: start at most {count} on this node, or pass device="
            )
        device = torch.device(kind.type, index)
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def _as_device(choice: Any, kind: torch.device | None) -> torch.device:
    if isinstance(choice, int) and not isinstance(choice, bool):
        if kind is None:
            raise ArgumentError(f"device={choice}: this machine has no accelerator with an index")
        return torch.device(kind.type, choice)
    try:
        return torch.device(choice)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device={choice!r} isn't a device: {error}") from error


def serves(backend: str, device_type: str) -> bool:
    """Return whether ranks of a backend compute on accelerators of a type."""
    if ":" in backend:  # the user names the devices
        return device_type in backends_by_device(backend)
    # Gloo is registered for CUDA, too, but isn't its default. Some accelerators have no default.
    return dist.Backend.default_device_backend_map.get(device_type) == backend


def join(
    backend: str,
    info: RankInfo,
    timeout: timedelta | None,
    left: timedelta,
    options: dict[str, Any],
) -> timedelta | None:
    """Create torch's default group; return the timeout of unisono's operations over it."""
    # Collective over all ranks of `info`. Gloo connects all ranks within the time left for set-up.
    # After that its timeout is slightly longer than the job's. So a rank that waits in unisono's
    # collectives times out before the ranks that wait in torch's, such as in a backward pass, and
    # its error names those ranks.
    if timeout is not None:
        options = {**options, "timeout": timeout}
    options = {**options, "rank": info.rank, "world_size": info.world_size}
    if set(backends_by_device(backend).values()) != {"gloo"}:
        dist.init_process_group(backend, **options)
        return timeout
    dist.init_process_group(backend, **{**options, "timeout": left})
    pg = dist.group.WORLD
    assert pg is not None
    allowed = timeout or dist.default_pg_timeout
    for device in {torch.device(name) for name in backends_by_device(backend)}:
        pg._get_backend(device)._set_default_timeout(allowed + _MARGIN)
    return allowed


def place_by_store(rank: int, world_size: int) -> Topology:
    """Return a rank's topology; a store that only one host can reach shows that it has one node."""
    one_node = Topology(rank, world_size, rank, world_size, 0, 1)
    if world_size == 1:
        return one_node
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):
        store = dist.distributed_c10d._get_default_store()  # torch has no public accessor
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if isinstance(store, HashStore):
            return one_node
        where = str(getattr(store, "path", ""))  # not in the stubs of torch 2.13
        if isinstance(store, FileStore) and where.startswith("/proc/self/"):  # see `_opened`
            return one_node
        if isinstance(store, FileStore):
            return replace(one_node, is_guess=True)  # several hosts may mount it
        if isinstance(store, TCPStore):
            host = store.host
            if host in ("localhost", "::1") or host.startswith("127."):
                return one_node
    return Topology(rank, world_size)


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return the timeout of a process group, or None."""
    with contextlib.suppress(AttributeError, RuntimeError):
        timeout = group._get_backend(device).options._timeout  # torch 2.13 has no public accessor
        return timeout if isinstance(timeout, timedelta) else None
    return None


def wrap(module: nn.Module, wrapper: str, device: torch.device, **options: Any) -> nn.Module | None:
    """Wrap a module in ``DistributedDataParallel``, or shard it with ``fully_shard``."""
    # Collective over all ranks.
    if wrapper == "ddp":
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module  # DistributedDataParallel rejects a frozen one
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


# Gloo's threads release an operation's tensors shortly after it. For a tensor with a Python object
# they need the interpreter lock. Destroying a group earlier waits for the threads, and torch 2.6
# holds the lock meanwhile: a deadlock. Exiting earlier aborts the program, "terminate called
# without an active exception": before Python 3.14, CPython unwinds a thread that requests the lock
# at exit, and torch requests it in a destructor, which must not be unwound.
_SETTLE_S = 3.0  # shorter than a launcher's wait for the exit of its ranks
_THREADS = Path("/proc/self/task")
# A wait for a condition variable, up to its fourth argument, the timeout. An idle thread has no
# timeout (0x0); gloo within an operation, or a thread that waits for the interpreter lock, has one.
_CONDITION = r"\d+ 0x\w+ 0x1?89 0x\w+ "
if torch.__version__ >= "2.7":
    _THREAD_NAME, _BUSY = "pt_gloo_runloop\n", re.compile(f"(?!{_CONDITION}0x0 )")
else:  # torch doesn't name gloo's threads, so any that Python didn't start may be one
    _THREAD_NAME, _BUSY = "", re.compile(f"running|{_CONDITION}0x[^0]")


def settle_at_exit() -> None:
    """Register a wait for gloo's threads before the interpreter exits."""
    atexit.unregister(settle)  # the handler registered last runs first
    atexit.register(settle)


def settle() -> None:
    """Wait until gloo's threads are idle, for at most `_SETTLE_S`."""
    until = time.monotonic() + _SETTLE_S
    while any(map(_BUSY.match, _system_calls())) and time.monotonic() < until:
        time.sleep(0.001)  # the threads may need the interpreter lock


def _system_calls() -> Iterator[str]:
    """Return the system call of each of gloo's threads, as the kernel formats it."""
    others = {str(thread.native_id) for thread in threading.enumerate()}
    with contextlib.suppress(FileNotFoundError):  # this isn't Linux
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError):  # the thread has exited
                name = (thread / "comm").read_text()
                if thread.name not in others and name.startswith(_THREAD_NAME):
                    yield (thread / "syscall").read_text()
