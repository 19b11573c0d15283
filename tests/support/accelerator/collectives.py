"""The backend of the device: gloo on the host memory behind it, with the limits of a real backend.

It refuses CPU tensors. All tensors of a group must be on the current device, which must be the same
for the life of the group, and different on each of its ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.utils._pytree import tree_map

from tests.support.accelerator.device import (
    LIBRARIES,
    MODULE,
    NAME,
    by_name,
    is_ours,
    new_library,
    to_host,
)

BACKEND = "pretendccl"


class _Behind:
    """The gloo group on the CPU that does the work of one process group."""

    def __init__(self, options: Any) -> None:
        self.store, self.rank = options.store, options.group_rank
        self.size = options.group_size
        self.index: int | None = None
        self.gloo = c10d.ProcessGroupGloo(
            c10d.PrefixStore("gloo", self.store), self.rank, self.size, options.timeout
        )
        self.group = c10d.ProcessGroup(self.store, self.rank, self.size)
        self.group._register_backend(
            torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, self.gloo
        )

    def meet(self, index: int) -> None:
        """Raise if this rank uses a second device, or, at its first call, another rank's device."""
        if self.index == index:
            return
        if self.index is not None:
            raise RuntimeError(f"{BACKEND}: a tensor on {NAME}:{index}, not {NAME}:{self.index}")
        self.index, mine = index, MODULE.physical(index)
        MODULE.events.append(f"connect {index}")
        self.store.set(f"device of {self.rank}", str(mine))
        for rank in range(self.size):
            other = int(self.store.get(f"device of {rank}"))
            if rank != self.rank and other == mine:
                text = f"Duplicate device: rank {self.rank} and rank {rank} both on number {mine}"
                raise RuntimeError(f"{BACKEND}: {text}")


_behind: dict[int, _Behind] = {}  # by torch's backend, which is gloo's


def _create(options: Any, _pg_options: Any) -> Any:
    behind = _Behind(options)
    _behind[id(behind.gloo)] = behind
    return behind.gloo


def register() -> None:
    """Register the backend with torch, and a kernel of the device for each collective."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[NAME])
    gloo: Any = c10d.ProcessGroupGloo  # torch splits groups that are bound to a device
    gloo.perform_nocolor_split = lambda backend, device: None
    library = new_library("c10d", "IMPL")
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("c10d::")
        takes_group = any(argument.name == "process_group" for argument in schema.arguments)
        if schema.name.startswith("c10d::") and takes_group:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # replacing torch's kernels warns
                library.impl(name, _kernel(name), "PrivateUse1", allow_override=True)
    LIBRARIES.append(library)


def _kernel(name: str) -> Any:
    op = getattr(torch.ops.c10d, name).default

    def run(*args: Any, **kwargs: Any) -> Any:
        given = by_name(op, args, kwargs)
        pg = c10d.ProcessGroup.unbox(given["process_group"])
        behind = _behind[id(pg._get_backend(torch.device(NAME)))]
        pairs: list[tuple[Tensor, Tensor]] = []

        def on_host(value: Any) -> Any:
            if not is_ours(value):
                return value
            MODULE.touch()
            behind.meet(value.device.index)
            if value.device.index != MODULE.current_device():
                raise RuntimeError(f"{BACKEND}: {name} of {value.device}, which isn't current")
            pairs.append((value, to_host(value)))
            return pairs[-1][1]

        given = tree_map(on_host, given)
        result = op(**{**given, "process_group": behind.group.boxed()})
        return tree_map(lambda value: _returned(value, pairs), result)

    return run


def _returned(value: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    for tensor, host in pairs:
        if isinstance(value, Tensor) and value.data_ptr() == host.data_ptr():
            return tensor
    if isinstance(value, torch.ScriptObject):
        return _work(c10d.Work.unbox(value), pairs).boxed()
    return value


def _work(work: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
    """Return a handle whose value is the tensors of the device, as DDP expects."""
    tensors = [tensor for tensor, _ in pairs]
    try:
        future = work.get_future()
    except RuntimeError:  # gloo has none for calls whose handle's value isn't used
        return work

    def value(done: Any) -> list[Tensor]:
        done.wait()  # raises the error of a failed call
        return tensors

    make: Any = c10d._create_work_from_future  # type: ignore[attr-defined]  # not in torch's stubs
    return make(future.then(value))
