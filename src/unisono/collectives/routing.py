"""Choice of the plane that carries a tensor; no other module decides it.

It is the control plane, memory that ranks of one host share, or the model's own library.
"""

from __future__ import annotations

from torch import Tensor

from unisono.context import ContextState
from unisono.host.collectives import HostCollectives, folds
from unisono.host.hierarchical import MemoryCollectives
from unisono.model.contract import ComputationModel
from unisono.model.reduction import ReduceOp, is_order_of_floats
from unisono.recording.records import plane_is
from unisono.topology import Group

_EXCHANGED_BYTES = 1 << 15  # of all ranks: more are reduced faster in memory, on 2 and 4 ranks
Plane = ComputationModel | HostCollectives
"""Collectives of tensors: the data plane, or memory that the ranks of a host share."""
Reducer = ComputationModel | MemoryCollectives
"""Implementations of `all_reduce`: a plane, or both planes in two levels."""


def fits_exchange(
    context: ContextState, tensor: Tensor, group: Group | None, *, folds: bool = False
) -> bool:
    """Return whether an exchange of the control plane carries a tensor."""
    # Local, and the same on every rank for tensors of the same dtype, shape and device. A tensor to
    # reduce is copied to the transport device first, and ranks may have it on different devices.
    is_on_cpu = context.model.transport_device.type == "cpu" if folds else tensor.is_cpu
    size_bytes = tensor.numel() * tensor.itemsize
    return is_on_cpu and size_bytes <= context.control.inline_bytes(group, folds)


def plane_for(context: ContextState, group: Group | None) -> Plane:
    """Return the plane that carries tensors too large for an exchange."""
    # Local, or collective at creation of the memory that ranks of one host share. They share none
    # if the transport device is an accelerator, so the choice doesn't depend on the tensor.
    memory = context.control.memory(group)
    if type(memory) is HostCollectives:  # memory in two levels only reduces
        plane_is("memory")
        return memory
    plane_is("data")
    return context.model


def reducer_for(context: ContextState, tensor: Tensor, group: Group | None) -> tuple[Reducer, bool]:
    """Return the plane that reduces a tensor, and whether an exchange does so in its place."""
    # Local or collective as `plane_for` is. An exchange reduces by the plane's dtypes, so that the
    # precision doesn't depend on the size of a tensor.
    memory = context.control.memory(group)  # first, as it connects the group
    is_exchanged = fits_exchange(context, tensor, group, folds=True)
    if type(memory) is HostCollectives:
        is_exchanged = is_exchanged and tensor.nbytes * memory.size <= _EXCHANGED_BYTES
    if not is_exchanged:
        plane_is("memory" if type(memory) is HostCollectives else "data")
    return memory or context.model, is_exchanged


def reduces_natively(plane: Reducer, tensor: Tensor, op: ReduceOp) -> bool:
    """Return whether `plane` itself supports this operation on this dtype."""
    # MIN and MAX of floats are emulated everywhere, because libraries treat NaN differently.
    if tensor.dtype not in plane.dtypes or is_order_of_floats(tensor, op):
        return False
    if isinstance(plane, MemoryCollectives):
        return folds(tensor.dtype, op)
    return op is not ReduceOp.AVERAGE  # by the contract, models never get AVERAGE
