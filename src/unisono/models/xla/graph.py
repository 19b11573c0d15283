"""Graphs on XLA's devices, and this replica's position; the only module that imports torch_xla.

Replicas may be threads of one process (XLA on a CPU, TPU v2 and v3). Then three rules apply:
every replica must run the same executable, so one compiles while the others wait; a launch may
block until all have launched, so no lock and no GIL may be held by then; and the inputs of a
graph must stay alive until it has run, for freeing a buffer waits for its readers.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor

from unisono.errors import ContextError
from unisono.topology import Topology

_XLAC: Any = torch_xla._XLAC
_compiling = threading.Lock()
_BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def n_replicas() -> int:
    """Count the devices that the runtime replicates over; 0 if no launcher set that up."""
    # This doesn't initialise the runtime.
    return int(_XLAC._xla_get_replication_devices_count())


def replica() -> Topology | None:
    """Return the position of the calling thread, None if it isn't a replica."""
    # This doesn't initialise the runtime.
    # With SPMD one program uses all devices, so that there are no replicas.
    if not _XLAC._xla_runtime_is_initialized() or xr.is_spmd():
        return None
    if n_replicas() == 0:
        # Not xr.world_size(), which caches its result, although replicas may start later.
        return Topology(0, 1, 0, 1, 0, 1)
    if xr.addressable_device_count() > 1 and not _is_replica_thread():
        return None
    world_size, local_world_size = xr.world_size(), xr.local_device_count()
    nnodes = max(1, world_size // local_world_size)
    return Topology(
        xr.global_ordinal(),
        world_size,
        xr.local_ordinal(),
        local_world_size,
        xr.host_index() if nnodes > 1 else 0,
        nnodes,
    )


def _is_replica_thread() -> bool:
    """Return whether the launcher is on the stack, because any other thread looks like rank 0."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_launcher = frame.f_globals.get("__name__") == "torch_xla._internal.pjrt"
        if is_launcher and frame.f_code.co_name == "_thread_fn":
            return True
        frame = frame.f_back
    return False


def begin(kind: str) -> None:
    """Start the runtime on one device of a kind, without replicas."""
    if not _XLAC._xla_runtime_is_initialized():
        xr.set_device_type(kind)
        torch_xla.device()  # starts the runtime
    elif xr.device_type() != kind:
        raise ContextError(
            f"{kind} was asked for, but XLA's runtime runs on {xr.device_type()} here and "
            "can't change: start a new process"
        )


device: Callable[[], torch.device] = torch_xla.device
"""Return the device of the calling replica."""
device_type: Callable[[], str] = xr.device_type
"""Return the kind of device that the runtime runs on, such as ``"TPU"``."""


def replicas_are_threads() -> bool:
    """Return whether all replicas of the job are in this process."""
    return n_replicas() > 1 and n_replicas() == xr.addressable_device_count()


def run(
    tensor: Tensor, build: Callable[[Tensor], Tensor], wait_for_all: Callable[[], object]
) -> Tensor:
    """Run one collective as a separate graph, the same on every replica."""
    # Collective over all replicas.
    device_name = str(tensor.device)
    _compute(tensor)  # not in the graph, because its history may differ between replicas
    # A token of an earlier graph would merge that graph into this one.
    _XLAC._set_all_reduce_token(device_name, None)
    wait_for_all()  # before the launch, which has no time limit
    result = build(tensor)
    token = _XLAC._get_all_reduce_token(device_name)
    _XLAC._set_all_reduce_token(device_name, None)
    _compute(result)
    del token  # alive until here, as the module's third rule demands
    return result


def cut(device_name: str) -> None:
    """Run all recorded operations of the device, so that no graph grows from step to step."""
    _XLAC._set_all_reduce_token(device_name, None)
    devices = xm.xla_real_devices([device_name])
    _XLAC._xla_wait_device_ops(devices)
    with _compiling:
        _XLAC._xla_step_marker(device_name, [], wait=False)
    _XLAC._xla_wait_device_ops(devices)


def _compute(tensor: Tensor) -> None:
    devices = xm.xla_real_devices([tensor.device])
    _XLAC._xla_wait_device_ops(devices)
    with _compiling:  # not during the waits: this call only compiles, and queues the launch
        _XLAC._xla_sync_multi([tensor], [], wait=False, sync_xla_data=False)
    _XLAC._xla_wait_device_ops(devices)


def all_gather(tensor: Tensor) -> Tensor:
    """Build the gathering of [*shape] to [n, *shape], bit by bit."""
    bits = _bitcast(tensor, _BITS.get(tensor.dtype, tensor.dtype))
    rows: Tensor = xm.all_gather(bits.unsqueeze(0), dim=0, pin_layout=False)
    return _bitcast(rows, tensor.dtype)


def all_to_all(rows: Tensor) -> Tensor:
    """Build the exchange of the rows of [n, *shape], bit by bit."""
    n, bits = rows.shape[0], _bitcast(rows, _BITS.get(rows.dtype, rows.dtype))
    received: Tensor = xm.all_to_all(bits.reshape(n, -1), 0, 0, n, pin_layout=False)
    return _bitcast(received.reshape(rows.shape), rows.dtype)


def all_reduce(tensor: Tensor, kind: str, as_bits: bool = False) -> Tensor:
    """Build the reduction of [*shape]; `as_bits` reduces floats as integers."""
    dtype = _BITS.get(tensor.dtype, tensor.dtype) if as_bits else tensor.dtype
    total: Tensor = xm.all_reduce(kind, _bitcast(tensor, dtype), pin_layout=False)
    return _bitcast(total, tensor.dtype)


def reduce_scatter(rows: Tensor, kind: str) -> Tensor:
    """Build the reduction of [n, *shape] to this replica's row."""
    n = rows.shape[0]
    # With a factor of 1, along dimension 0, in n parts.
    row: Tensor = xm.reduce_scatter(kind, rows.reshape(n, -1), 1.0, 0, n, pin_layout=False)
    return row.reshape(rows.shape[1:])


def _bitcast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # XLA's collectives add a zero to the values that they move, which loses the sign of -0.0 and
    # denormals; Tensor.view(dtype) would go through the host.
    if tensor.dtype == dtype:
        return tensor
    graph = _bitcast_graph(tuple(tensor.shape), tensor.dtype, dtype)
    cast: list[Tensor] = _XLAC._xla_user_computation("unisono::bitcast", [tensor], graph)
    return cast[0]


@functools.lru_cache(maxsize=1024)
def _bitcast_graph(shape: tuple[int, ...], source: torch.dtype, target: torch.dtype) -> Any:
    kind = xb.Op.from_torch_type(target)
    arrives = xb.mkshape(xb.Op.from_torch_type(source), shape)
    return xb.create_computation("bitcast", lambda op: op.bitcast(kind), (arrives,))
